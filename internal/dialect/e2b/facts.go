package e2b

import (
	"context"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/covehq/cove/internal/agentapi"
)

// factsDir is where a sandbox finds, as files, what its environment says of it. Programs that were started with another
// environment, such as those of sudo, read them there.
const factsDir = "/run/e2b"

// isolationNone is what a driver says whose sandboxes have no files of their own: /run would be the host's.
const isolationNone = "none"

// factsFor bounds how long the files may take: a sandbox is as good without them.
const factsFor = 20 * time.Second

// tell writes the files. They are root's, for all to read. Where a sandbox has no root or no room for them, as in a hardened
// Pod, there are none.
func (a *API) tell(c *call, id, template string) {
	if a.facts == "" {
		return
	}
	ctx, cancel := context.WithTimeout(c.ctx(), factsFor)
	defer cancel()
	agent, err := a.sandboxes.Agent(ctx, c.who, id)
	if err != nil {
		return // whatever comes next fails by the same reason, and says so
	}
	var work sync.WaitGroup
	for name, value := range map[string]string{sandboxVariable: "true", idVariable: id, templateVariable: template} {
		work.Go(func() {
			file := agentapi.WriteParams{Path: path.Join(a.facts, "."+name), User: "root", Root: true, InPlace: true}
			if _, err := agent.Write(ctx, file, strings.NewReader(value)); err != nil {
				a.log.Debug("a file that tells a sandbox of itself was not written", "sandbox", id, "path", file.Path, "error", err)
			}
		})
	}
	work.Wait()
}
