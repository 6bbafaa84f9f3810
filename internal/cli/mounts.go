package cli

import (
	"fmt"
	"strings"

	"github.com/covehq/cove/client"
)

// mounts reads --mount SOURCE:TARGET[:ro|:rw]. A source with a slash in front is a path of the server's host.
func mounts(given []string) ([]client.Mount, error) {
	var all []client.Mount
	for _, text := range given {
		parts := strings.Split(text, ":")
		if len(parts) < 2 || len(parts) > 3 || parts[0] == "" || !strings.HasPrefix(parts[1], "/") {
			return nil, usageError{fmt.Errorf("--mount %q: want SOURCE:TARGET, SOURCE:TARGET:ro or SOURCE:TARGET:rw; the target begins with /", text)}
		}
		m := client.Mount{Kind: "volume", Source: parts[0], Target: parts[1], Create: true}
		if strings.HasPrefix(m.Source, "/") {
			m.Kind, m.Create, m.ReadOnly = "host", false, true
		} else {
			m.Source, m.SubPath, _ = strings.Cut(m.Source, "/")
		}
		if len(parts) == 3 {
			switch parts[2] {
			case "ro":
				m.ReadOnly = true
			case "rw":
				m.ReadOnly = false
			default:
				return nil, usageError{fmt.Errorf("--mount %q: what comes last is ro or rw, not %q", text, parts[2])}
			}
		}
		all = append(all, m)
	}
	return all, nil
}

// mountText is a mount in a line.
func mountText(m client.Mount) string {
	from, access := m.Source, "rw"
	if m.SubPath != "" {
		from += "/" + m.SubPath
	}
	if m.ReadOnly {
		access = "ro"
	}
	return fmt.Sprintf("%s: %s at %s, %s", m.Kind, from, m.Target, access)
}
