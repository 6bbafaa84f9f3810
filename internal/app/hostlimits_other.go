//go:build !linux

package app

import "github.com/covehq/cove/internal/template"

func hostLimits(string) template.Limits { return template.Limits{} }

func diskFree(string) (int64, bool) { return 0, false }

func diskFiles(string) (total, free uint64) { return 0, 0 }

func diskSize(string) int64 { return 0 }

func takeSpace(string, int64) error { return nil }
