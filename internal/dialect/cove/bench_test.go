package cove_test

import (
	"testing"

	"github.com/covehq/cove/client"
)

// The API's own share of 1+1: everything but a real agent and kernel.
func BenchmarkRun(b *testing.B) {
	sb := newWorld(b).sandbox(b)
	for _, way := range []struct {
		name string
		run  func() error
	}{
		{"collected", func() error {
			_, err := sb.Run(b.Context(), client.RunRequest{Code: "1+1"})
			return err
		}},
		{"streamed", func() error {
			for _, err := range sb.RunCode(b.Context(), client.RunRequest{Code: "1+1"}) {
				if err != nil {
					return err
				}
			}
			return nil
		}},
	} {
		b.Run(way.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := way.run(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkFloodOfOutput(b *testing.B) {
	sb := newWorld(b).sandbox(b)
	b.SetBytes(64 << 20)
	for b.Loop() {
		for _, err := range sb.RunCode(b.Context(), client.RunRequest{Code: "flood 64"}) {
			if err != nil {
				b.Fatal(err)
			}
		}
	}
}
