package app

import (
	"context"

	"github.com/covehq/cove/internal/config"
)

// Finding is one thing that doctor looked at.
type Finding struct {
	Name   string `json:"name"`
	Level  string `json:"level"` // ok, note, warn, refuse
	Detail string `json:"detail"`
	Remedy string `json:"remedy,omitempty"`
}

// LevelRefuse is the level of a finding that makes a server unsafe to run.
const LevelRefuse = "refuse"

// Doctor looks at this host with the eyes of the configured driver.
func Doctor(ctx context.Context, cfg config.Config) []Finding {
	findings := checkHost(ctx, cfg)
	findings = append(findings, checkData(cfg)...)
	return append(findings, checkDatabase(ctx, cfg)...)
}
