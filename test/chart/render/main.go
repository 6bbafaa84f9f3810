// Command render prints Cove's chart as `helm template` would, for a cluster where there is no helm.
//
//	cd test/chart && go run ./render -namespace cove -values my-values.yaml | kubectl apply -f -
package main

import (
	"flag"
	"fmt"
	"os"

	"helm.sh/helm/v3/pkg/chartutil"
	"sigs.k8s.io/yaml"

	"github.com/covehq/cove/test/chart"
)

func main() {
	dir := flag.String("chart", "../../deploy/chart/cove", "the chart")
	release := flag.String("release", "cove", "the release's name")
	namespace := flag.String("namespace", "cove", "the release's namespace")
	var files []string
	flag.Func("values", "a file of values, several times; the later ones count more", func(file string) error {
		files = append(files, file)
		return nil
	})
	flag.Parse()
	if err := render(*dir, *release, *namespace, files); err != nil {
		fmt.Fprintln(os.Stderr, "render:", err)
		os.Exit(1)
	}
}

func render(dir, release, namespace string, files []string) error {
	values := map[string]any{}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		read := map[string]any{}
		if err := yaml.Unmarshal(data, &read); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		values = chartutil.MergeTables(read, values)
	}
	text, err := chart.Render(dir, release, namespace, values)
	if err != nil {
		return err
	}
	_, err = os.Stdout.WriteString(text)
	return err
}
