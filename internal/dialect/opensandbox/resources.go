package opensandbox

import (
	"math"
	"strconv"
	"strings"

	"github.com/covehq/cove/internal/template"
)

// parseResources reads limits as Kubernetes and Docker write them. A memory that is the clients' own default, which nobody
// chose, is lowered to what the host has.
func parseResources(limits map[string]string, most template.Limits) (template.Limits, error) {
	var l template.Limits
	for name, text := range limits {
		switch name {
		case "cpu":
			cpus, ok := ParseCPU(text)
			if !ok {
				return l, invalid("resource cpu=%.40q: write it as 500m, 1 or 0.5", text)
			}
			l.CPUs = cpus
		case "memory":
			bytes, ok := ParseBytes(text)
			if !ok {
				return l, invalid("resource memory=%.40q: write it as 512Mi, 2Gi or a number of bytes", text)
			}
			l.MemoryBytes = bytes
			if text == defaultMemory && most.MemoryBytes > 0 {
				l.MemoryBytes = min(bytes, most.MemoryBytes)
			}
		case "disk", "storage", "ephemeral-storage":
			bytes, ok := ParseBytes(text)
			if !ok {
				return l, invalid("resource %s=%.40q: write it as 512Mi, 2Gi or a number of bytes", name, text)
			}
			l.DiskBytes = bytes
		case "gpu", "nvidia.com/gpu":
			if text != "" && text != "0" {
				return l, invalid("resource %s=%.40q: this server gives sandboxes no GPU", name, text)
			}
		default:
			return l, invalid("resource %.60q is not served here: use cpu, memory and disk", name)
		}
	}
	return l, nil
}

// defaultMemory is what the clients ask for when their user says nothing.
const defaultMemory = "2Gi"

// ParseCPU reads a number of processors, or thousandths of one: 500m.
func ParseCPU(text string) (float64, bool) {
	text = strings.TrimSpace(text)
	number, milli := strings.CutSuffix(text, "m")
	v, ok := decimal(number)
	if milli {
		v /= 1000
	}
	return v, ok && v > 0 && v <= 1<<20
}

// decimal reads a plain number: digits and perhaps a point, without sign, exponent or words.
func decimal(text string) (float64, bool) {
	if text == "" || strings.ContainsFunc(text, func(c rune) bool { return (c < '0' || c > '9') && c != '.' }) {
		return 0, false
	}
	v, err := strconv.ParseFloat(text, 64)
	return v, err == nil && !math.IsInf(v, 0)
}

var byteUnits = map[string]float64{
	"": 1, "b": 1,
	"k": 1e3, "kb": 1e3, "ki": 1 << 10, "kib": 1 << 10,
	"m": 1e6, "mb": 1e6, "mi": 1 << 20, "mib": 1 << 20,
	"g": 1e9, "gb": 1e9, "gi": 1 << 30, "gib": 1 << 30,
	"t": 1e12, "tb": 1e12, "ti": 1 << 40, "tib": 1 << 40,
}

// ParseBytes reads a number of bytes with or without a unit, whose case does not matter.
func ParseBytes(text string) (int64, bool) {
	text = strings.ToLower(strings.TrimSpace(text))
	end := strings.IndexFunc(text, func(c rune) bool { return (c < '0' || c > '9') && c != '.' })
	if end < 0 {
		end = len(text)
	}
	unit, known := byteUnits[strings.TrimSpace(text[end:])]
	v, ok := decimal(text[:end])
	v *= unit
	return int64(v), known && ok && v >= 1 && v <= 1<<60
}
