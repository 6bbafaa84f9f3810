package runtime_test

import (
	"strings"
	"testing"

	"github.com/covehq/cove/internal/dialect/agentsandbox/runtime"
)

func FuzzDisposition(f *testing.F) {
	for _, header := range []string{
		`form-data; name="file"; filename="a/b"`, `form-data; filename*=UTF-8''%C3%BC`, `;="\`, `form-data; name=file; filename=x`,
	} {
		f.Add(header)
	}
	f.Fuzz(func(t *testing.T, header string) {
		name, filename := runtime.Disposition(header)
		if len(name) > len(header) || len(filename) > len(header) {
			t.Fatalf("%q grew to %q and %q", header, name, filename)
		}
		if strings.ContainsAny(header, "\"\\;=\r\n") {
			return
		}
		if _, got := runtime.Disposition(`form-data; name="file"; filename="` + header + `"`); !strings.Contains(header, "%") && got != header {
			t.Fatalf("%q became %q", header, got)
		}
	})
}

func FuzzTimeout(f *testing.F) {
	for _, text := range []string{"60", "2.5", "1e9", "-1", "NaN", "Inf", "", " 3 ", "0x1p4"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		d, err := runtime.ParseTimeout([]string{text})
		if (err == nil) != (d > 0) {
			t.Fatalf("%q is %v, %v", text, d, err)
		}
	})
}
