//go:build !linux

package app

import "github.com/covehq/cove/internal/template"

func hostLimits(string) template.Limits { return template.Limits{} }
