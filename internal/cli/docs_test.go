package cli_test

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/covehq/cove/internal/cli"
)

var update = flag.Bool("update", false, "write docs/cli.md anew")

const docs = "../../docs/cli.md"

func TestTheDocsAreCurrent(t *testing.T) {
	want := markdown(cli.Root())
	if *update {
		if err := os.WriteFile(docs, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(docs)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s is not what the commands say: run make docs", docs)
	}
}

// Every command says what it is for, and every flag what its value is.
func TestEveryCommandAndFlagIsExplained(t *testing.T) {
	each(cli.Root(), func(c *cobra.Command) {
		if c.Short == "" {
			t.Errorf("%s has no summary", c.CommandPath())
		}
		c.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
			if name, about := pflag.UnquoteUsage(f); about == "" || name == "string" || name == "stringArray" || name == "float" || name == "int" {
				t.Errorf("%s --%s: value %q, %q", c.CommandPath(), f.Name, name, about)
			}
		})
	})
}

// each visits the commands that people see, families before their children.
func each(c *cobra.Command, visit func(*cobra.Command)) {
	visit(c)
	for _, child := range c.Commands() {
		if child.IsAvailableCommand() {
			each(child, visit)
		}
	}
}

func markdown(root *cobra.Command) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "# The cove command\n\nGenerated from the commands themselves by `make docs`; `cove help COMMAND` says the same.\n\n%s\n", prose(root.Long))
	fmt.Fprintf(&b, "\n```\n%s\n```\n", unindent(root.Example))
	fmt.Fprintf(&b, "\nEvery command takes these flags as well:\n\n%s", flags(root.PersistentFlags()))
	for _, g := range root.Groups() {
		fmt.Fprintf(&b, "\n## %s\n\n| | |\n|---|---|\n", strings.TrimSuffix(g.Title, ":"))
		inGroup(root, g, func(c *cobra.Command) {
			fmt.Fprintf(&b, "| [`%s`](#%s) | %s |\n", c.CommandPath(), strings.ReplaceAll(c.CommandPath(), " ", "-"), c.Short)
		})
		inGroup(root, g, func(c *cobra.Command) { section(&b, c) })
	}
	return b.Bytes()
}

// inGroup visits the commands of a group that do something.
func inGroup(root *cobra.Command, g *cobra.Group, visit func(*cobra.Command)) {
	for _, c := range root.Commands() {
		if c.GroupID == g.ID && c.Name() != "help" {
			each(c, func(c *cobra.Command) {
				if !c.HasSubCommands() {
					visit(c)
				}
			})
		}
	}
}

func section(b *bytes.Buffer, c *cobra.Command) {
	about := c.Long
	if about == "" {
		about = c.Short + "."
	}
	fmt.Fprintf(b, "\n### %s\n\n%s\n\n```\n%s\n```\n", c.CommandPath(), prose(about), c.UseLine())
	if c.Example != "" {
		fmt.Fprintf(b, "\nFor example:\n\n```\n%s\n```\n", unindent(c.Example))
	}
	if own := c.LocalNonPersistentFlags(); own.HasAvailableFlags() {
		fmt.Fprintf(b, "\n%s", flags(own))
	}
}

func flags(set *pflag.FlagSet) string {
	var b strings.Builder
	b.WriteString("| flag | |\n|---|---|\n")
	set.VisitAll(func(f *pflag.Flag) {
		value, about := pflag.UnquoteUsage(f)
		name := "`--" + f.Name
		if f.Shorthand != "" {
			name = "`-" + f.Shorthand + "`, " + name
		}
		if value != "" {
			name += strings.TrimSuffix(" "+value, " =PROCESS")
		}
		cell := strings.NewReplacer("|", "\\|", "\n", " ")
		fmt.Fprintf(&b, "| %s` | %s |\n", cell.Replace(name), cell.Replace(about))
	})
	return b.String()
}

// prose joins lines that were broken for a terminal; what is indented stays as it is.
func prose(text string) string {
	var out []string
	for part := range strings.SplitSeq(text, "\n\n") {
		if strings.HasPrefix(part, "  ") {
			out = append(out, "```\n"+unindent(part)+"\n```")
			continue
		}
		out = append(out, strings.ReplaceAll(part, "\n", " "))
	}
	return strings.Join(out, "\n\n")
}

func unindent(text string) string {
	return strings.TrimPrefix(strings.ReplaceAll(text, "\n  ", "\n"), "  ")
}
