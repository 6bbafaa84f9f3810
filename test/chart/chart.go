// Package chart renders Cove's Helm chart as helm does, without helm: for tests of the chart, and for the plain manifests that
// are made from it.
package chart

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
)

// Render is what `helm template` prints for a chart: its objects, in the order in which a cluster takes them.
func Render(dir, release, namespace string, values map[string]any) (string, error) {
	c, err := loader.Load(dir)
	if err != nil {
		return "", err
	}
	all, err := chartutil.ToRenderValues(c, values, chartutil.ReleaseOptions{Name: release, Namespace: namespace, IsInstall: true, Revision: 1}, nil)
	if err != nil {
		return "", err
	}
	files, err := engine.Render(c, all)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	for _, name := range slices.SortedFunc(maps.Keys(files), inOrder) {
		text := strings.TrimSpace(files[name])
		if path.Ext(name) != ".yaml" || text == "" {
			continue
		}
		fmt.Fprintf(&b, "---\n# %s\n%s\n", path.Base(name), strings.TrimPrefix(text, "---\n"))
	}
	return b.String(), nil
}

// inOrder puts the namespace first, since others are in it, and what starts Pods last.
func inOrder(a, b string) int {
	rank := func(name string) int {
		switch path.Base(name) {
		case "namespace.yaml":
			return 0
		case "deployment.yaml":
			return 2
		}
		return 1
	}
	if d := rank(a) - rank(b); d != 0 {
		return d
	}
	return strings.Compare(a, b)
}
