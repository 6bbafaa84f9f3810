package cli

import (
	"cmp"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/covehq/cove/internal/config"
)

func (a *invocation) configure() *cobra.Command {
	return family("config", "Show the configuration", a.configShow())
}

func (a *invocation) configShow() *cobra.Command {
	return &cobra.Command{
		Use:   "show",
		Short: "Show every setting, and where its value comes from",
		Long: "Show every setting as `cove serve` would find it here and now, and which source decided it: a flag, else the environment,\n" +
			"else the file, else the default; - leaves it to the server. Then where the other commands look for a server. Keys are\n" +
			"not shown. A server that runs already may have been started with other settings.",
		Args: exactArgs(0, "no arguments"),
		RunE: func(*cobra.Command, []string) error {
			src, err := a.configSource(nil)
			if err != nil {
				return err
			}
			settings, err := config.Explain(src)
			if err != nil {
				return err
			}
			settings = append(settings, clientSettings()...)
			return a.print(settings, func(t *table) {
				t.head("SETTING", "FROM", "VALUE") // what can be long comes last
				for _, s := range settings {
					origin := cell{s.From, dim}
					if s.From != config.FromDefault {
						origin.style = ""
					}
					t.row(s.Name, origin, cmp.Or(s.Value, "-"))
				}
			})
		},
	}
}

// clientSettings are those that only the commands read.
func clientSettings() []config.Setting {
	all := []config.Setting{{Name: "url", From: config.FromDefault}, {Name: "api_key", From: config.FromDefault}}
	if url := os.Getenv("COVE_URL"); url != "" {
		all[0].Value, all[0].From = url, "environment COVE_URL"
	}
	if os.Getenv("COVE_API_KEY") != "" {
		all[1].Value, all[1].From = "••••••••", "environment COVE_API_KEY"
	}
	return all
}

// configSource is where the configuration comes from; flags are settings by their dotted name.
func (a *invocation) configSource(flags map[string]string) (config.Source, error) {
	src := config.Source{File: a.config, Env: os.LookupEnv, Flags: map[string]string{}}
	for k, v := range flags {
		src.Flags[k] = v
	}
	if a.dataDir != "" {
		dir, err := filepath.Abs(a.dataDir)
		if err != nil {
			return src, err
		}
		src.Flags["data_dir"] = dir
	}
	return src, nil
}
