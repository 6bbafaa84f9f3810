package native_test

import (
	"testing"

	"github.com/covehq/cove/internal/driver/drivertest"
	"github.com/covehq/cove/internal/template"
)

func TestDriver(t *testing.T) {
	drivertest.Run(t, func(t *testing.T) drivertest.Subject {
		built := buildTemplate(t, "python")
		return drivertest.Subject{
			Driver: world.driver, Tenant: tenant, Template: built,
			Limits: template.Limits{CPUs: 1, MemoryBytes: 512 << 20, Pids: 128, OpenFiles: 1024},
		}
	})
}
