package agentsandbox

import (
	"encoding/json"
	"strconv"
	"strings"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

// parseLimits reads the limits of a container.
func parseLimits(limits map[string]any) (l template.Limits, err error) {
	for name, v := range limits {
		given := quantityText(v)
		n, ok := ParseQuantity(given)
		if !ok {
			return l, fault.New(fault.Invalid, "limit %.60s=%.40q is not a quantity: write it as 500m, 2, 512Mi or 2Gi", name, given)
		}
		switch name {
		case "cpu":
			l.CPUs = n
		case "memory":
			l.MemoryBytes = int64(n)
		case "ephemeral-storage":
			l.DiskBytes = int64(n)
		default:
			return l, fault.New(fault.Unsupported, "limit %.60q is not served here: use cpu, memory and ephemeral-storage", name)
		}
	}
	return l, nil
}

func quantityText(v any) string {
	switch t := v.(type) {
	case string:
		return t
	case json.Number:
		return t.String()
	case float64:
		return strconv.FormatFloat(t, 'f', -1, 64)
	}
	return ""
}

var quantityUnits = []struct {
	suffix string
	factor float64
}{
	{"Ki", 1 << 10}, {"Mi", 1 << 20}, {"Gi", 1 << 30}, {"Ti", 1 << 40}, {"Pi", 1 << 50},
	{"m", 1e-3}, {"k", 1e3}, {"M", 1e6}, {"G", 1e9}, {"T", 1e12}, {"P", 1e15},
}

// ParseQuantity reads a number as Kubernetes writes amounts.
func ParseQuantity(given string) (float64, bool) {
	digits, factor := given, 1.0
	for _, u := range quantityUnits {
		if rest, ok := strings.CutSuffix(given, u.suffix); ok {
			digits, factor = rest, u.factor
			break
		}
	}
	if digits == "" || len(digits) > 24 || strings.Trim(digits, "0123456789.eE") != "" {
		return 0, false
	}
	n, err := strconv.ParseFloat(digits, 64)
	n *= factor
	return n, err == nil && n > 0 && n <= 1<<60
}
