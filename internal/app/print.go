package app

import (
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/covehq/cove/client"
)

// printNext tells a person what to paste: for our own commands and for E2B's SDKs. A new key is shown on
// a terminal only: elsewhere it would stay in a log.
func (s *Server) printNext(out io.Writer, terminal bool) {
	key, program := "$("+s.reading(s.KeyFile)+")", "cove"
	if p, err := os.Executable(); err == nil {
		program = p
	}
	fmt.Fprintf(out, "\nCove is ready at %s\n\n", s.URL)
	if s.NewKey && terminal {
		fmt.Fprintf(out, "  admin key   %s   (shown this once; kept in %s)\n", string(s.Key), s.KeyFile)
	} else {
		fmt.Fprintf(out, "  admin key   in %s\n", s.KeyFile)
	}
	fmt.Fprintf(out, "  API         %s%s/openapi.json\n", s.URL, client.Prefix)
	if s.PlainRefused {
		fmt.Fprintf(out, "\n  Other machines are refused: plain HTTP would show their keys to the network. Serve TLS with --domain NAME,\n"+
			"  name a TLS proxy in server.trusted_proxies (COVE_SERVER_TRUSTED_PROXIES), or allow it with --insecure-http.\n")
	}
	if s.Caps.Isolation == "none" {
		fmt.Fprintf(out, "\n  WARNING: the %s driver isolates nothing: what runs here runs on this host.\n", s.Caps.Name)
	}
	fmt.Fprintf(out, "\nPaste next, in another terminal:\n\n")
	fmt.Fprintf(out, "  export COVE_URL=%s COVE_API_KEY=%s\n", s.URL, key)
	fmt.Fprintf(out, "  %s run -c 'print(1 + 1)'\n", program)
	fmt.Fprintf(out, "  curl -s -X POST $COVE_URL%s/sandboxes -H \"X-API-Key: $COVE_API_KEY\" -d '{}'\n\n", client.Prefix)
	s.printE2B(out, key)
	s.printOpenSandbox(out, key)
	s.printKubernetes(out, program)
}

func (s *Server) printKubernetes(out io.Writer, program string) {
	if s.facade == nil {
		return
	}
	fmt.Fprintf(out, "Or with kubectl and agent-sandbox's clients, without a cluster (pip install k8s-agent-sandbox):\n\n")
	fmt.Fprintf(out, "  %s kubeconfig --out ~/.kube/cove && export KUBECONFIG=~/.kube/cove   # then kubectl get sandboxclaims -A\n\n", program)
}

func (s *Server) printOpenSandbox(out io.Writer, key string) {
	domain := strings.TrimPrefix(s.URL, "http://")
	fmt.Fprintf(out, "Or with OpenSandbox's SDKs, unmodified (pip install opensandbox, npm i @alibaba-group/opensandbox):\n\n")
	if s.cfg.Auth.Anonymous {
		fmt.Fprintf(out, "  export OPEN_SANDBOX_DOMAIN=%s   # no key is needed on this machine\n", domain)
	} else {
		fmt.Fprintf(out, "  export OPEN_SANDBOX_DOMAIN=%s OPEN_SANDBOX_API_KEY=%s\n", domain, key)
	}
	fmt.Fprint(out, `
  # Python
  from opensandbox import SandboxSync
  with SandboxSync.create("python:3.12-slim") as sandbox:
      print(sandbox.commands.run("python3 -c 'print(1 + 1)'").logs.stdout[0].text)
      sandbox.kill()

`)
}

// reading is a shell command that prints a file of the server's own.
func (s *Server) reading(file string) string {
	if info, err := os.Stat(file); err == nil && !readableHere(info) {
		return "sudo cat " + file
	}
	return "cat " + file
}

func (s *Server) printE2B(out io.Writer, key string) {
	fmt.Fprintf(out, "Or with E2B's SDKs, unmodified (pip install e2b-code-interpreter, npm i @e2b/code-interpreter):\n\n")
	fmt.Fprintf(out, "  export E2B_API_URL=%s E2B_SANDBOX_URL=%s E2B_API_KEY=%s\n", s.URL, s.URL, key)
	fmt.Fprint(out, `
  # Python
  from e2b_code_interpreter import Sandbox
  with Sandbox.create() as sandbox:
      print(sandbox.run_code("1 + 1").text)

  // JavaScript
  import { Sandbox } from '@e2b/code-interpreter'
  const sandbox = await Sandbox.create()
  console.log((await sandbox.runCode('1 + 1')).text)

`)
	if s.Domain == "" {
		return
	}
	fmt.Fprintf(out, "Or by host name, over TLS; *.%s must lead to this machine:\n\n", s.cfg.TLS.Domain)
	if missing := namesLead(s.cfg.TLS.Domain, lookup); missing != "" {
		fmt.Fprintf(out, "  NOTE: %s\n\n", missing)
	}
	if s.CAFile == "" {
		fmt.Fprintf(out, "  export E2B_DOMAIN=%s E2B_API_KEY=%s\n\n", s.Domain, key)
		return
	}
	fmt.Fprintf(out, "  %s > ~/cove-ca.pem   # the server's own authority, good for this domain only\n", s.reading(s.CAFile))
	fmt.Fprintf(out, "  export SSL_CERT_FILE=~/cove-ca.pem NODE_EXTRA_CA_CERTS=~/cove-ca.pem   # Python and curl trust nobody else then\n")
	fmt.Fprintf(out, "  export E2B_DOMAIN=%s E2B_API_KEY=%s\n\n", s.Domain, key)
}
