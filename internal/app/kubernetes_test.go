package app

import (
	"strings"
	"testing"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

func TestTemplatesOfAClusterAreItsOperators(t *testing.T) {
	templates := newClusterTemplates([]*template.Template{{Name: "python", Digest: "d"}, {Name: "small"}}, "python")
	for name, want := range map[string]string{"python": "python", "small": "small", "code-interpreter": "python", "other": ""} {
		got, err := templates.Resolve(t.Context(), "acme", name)
		switch {
		case want == "" && (!fault.Is(err, fault.NotFound) || !strings.Contains(fault.Message(err), "python, small")):
			t.Errorf("%s: %v", name, err)
		case want != "" && (err != nil || got.Name != want):
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	if list := templates.List("acme"); len(list) != 2 || list[0].Name != "python" || list[0].Digest != "d" {
		t.Errorf("%+v", list)
	}
}
