package cli

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"

	"github.com/covehq/cove/internal/app"
)

func (a *invocation) doctor() *cobra.Command {
	var verify bool
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Check this host and say what to do about each finding",
		Long: "Check whether this host can run sandboxes safely. Every finding is explained with its remedy; what makes it unsafe\nis refused, and the exit code is then 1.\n\n" +
			"With --verify the content of every template in the data directory is read and compared with what was built, which takes\n" +
			"seconds for each.",
		Args: exactArgs(0, "no arguments"),
		RunE: func(c *cobra.Command, _ []string) error {
			cfg, err := a.load(nil)
			if err != nil {
				return err
			}
			findings := app.Doctor(c.Context(), cfg)
			if verify {
				findings = append(findings, app.VerifyTemplates(c.Context(), cfg)...)
			}
			if err := a.print(findings, func(t *table) { report(t, findings) }); err != nil {
				return err
			}
			for _, f := range findings {
				if f.Level == app.LevelRefuse {
					return exit(exitFailure)
				}
			}
			return nil
		},
	}
	c.Flags().BoolVar(&verify, "verify", false, "read all templates and compare them with what was built; needs root")
	return c
}

var marks = map[string]cell{"ok": {"ok", green}, "note": {"note", cyan}, "warn": {"WARN", yellow}, app.LevelRefuse: {"REFUSED", red}}

func report(t *table, findings []app.Finding) {
	refused := 0
	for _, f := range findings {
		if f.Level == app.LevelRefuse {
			refused++
		}
		t.row(marks[f.Level], f.Name, f.Detail)
		if f.Remedy != "" && f.Level != "ok" {
			t.row("", "", "→ "+f.Remedy)
		}
	}
	if refused > 0 {
		t.row("")
		t.row(fmt.Sprintf("This host is not safe to serve from: %d refused.", refused))
		return
	}
	t.row("")
	t.row("This host can run sandboxes.")
}

type versionInfo struct {
	Version  string `json:"version"`
	Revision string `json:"revision,omitempty"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

func (a *invocation) version() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: exactArgs(0, "no arguments"),
		RunE: func(*cobra.Command, []string) error {
			v := versionInfo{Version: app.Version, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
			if info, ok := debug.ReadBuildInfo(); ok {
				if v.Version == "" {
					v.Version = info.Main.Version
				}
				for _, s := range info.Settings {
					if s.Key == "vcs.revision" {
						v.Revision = s.Value
					}
				}
			}
			if v.Version == "" {
				v.Version = "(devel)"
			}
			return a.print(v, func(t *table) {
				t.row(strings.Join(strings.Fields("cove "+v.Version+" "+v.Revision+" "+v.Go+" "+v.Platform), " "))
			})
		},
	}
}
