package cli_test

import (
	"sync"
	"testing"

	"github.com/covehq/cove/client"
)

func TestACommandThatEndsBeforeItsInputStillTellsItsEnd(t *testing.T) {
	sb := serve(t)
	for range 100 {
		s, err := sb.Start(t.Context(), client.ExecRequest{Argv: []string{"sh", "-c", "exit 7"}})
		if err != nil {
			t.Fatal(err)
		}
		var typing sync.WaitGroup
		typing.Go(func() { _, _ = s.Write(make([]byte, 1<<20)) }) // nobody reads it
		var last client.Event
		for e, err := range s.Events() {
			if err != nil {
				t.Fatal(err)
			}
			last = e
		}
		s.Close()
		typing.Wait()
		if last.End == nil || last.End.ExitCode != 7 {
			t.Fatalf("the last word is %+v", last)
		}
	}
}
