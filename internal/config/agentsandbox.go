package config

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
)

// AgentSandbox is the third listener, which speaks as much of Kubernetes' API as the clients of agent-sandbox need.
type AgentSandbox struct {
	Listen string   `toml:"listen"` // host:port, or off; empty: 127.0.0.1:7445 (port 0 where the plain listener has 0)
	URL    string   `toml:"url"`    // as clients reach it; empty: https and the listener's address
	Names  []string `toml:"names"`  // hosts and addresses that its certificate is for, beside localhost
	Cert   string   `toml:"cert"`   // PEM file of a certificate; empty: the server makes its own
	Key    string   `toml:"key"`
	CA     string   `toml:"ca"` // PEM file of what clients must trust for Cert; empty: what they trust anyhow

	Templates  map[string]string   `toml:"templates"`  // name of a SandboxTemplate and pool that is always there → template that it stands for
	Namespaces map[string][]string `toml:"namespaces"` // tenant → namespaces that it may use; a tenant that is not named: any
}

// AgentSandboxOff is the listen setting of a server without this listener.
const AgentSandboxOff = "off"

// DefaultAgentSandboxListen is where the listener is that was not told.
const DefaultAgentSandboxListen = "127.0.0.1:7445"

// AgentSandboxListen is where the listener is; empty: there is none. A server for one command has none.
func (c Config) AgentSandboxListen() string {
	switch {
	case c.AgentSandbox.Listen == AgentSandboxOff, c.Ephemeral && c.AgentSandbox.Listen == "":
		return ""
	case c.AgentSandbox.Listen != "":
		return c.AgentSandbox.Listen
	}
	if _, port, _ := net.SplitHostPort(c.Listen); port == "0" { // validated
		return "127.0.0.1:0"
	}
	return DefaultAgentSandboxListen
}

// defaultAgentTemplates are names that people know from agent-sandbox's own examples.
func defaultAgentTemplates() map[string]string {
	m := map[string]string{}
	for _, name := range []string{
		"python-3.11", "python-3.12", "python-3.13", "python-runtime-template", "python-sandbox-template", "simple-sandbox-template",
	} {
		m[name] = "python"
	}
	return m
}

func (a AgentSandbox) validate() error {
	if a.Listen != "" && a.Listen != AgentSandboxOff {
		if _, _, err := net.SplitHostPort(a.Listen); err != nil {
			return fmt.Errorf("agent_sandbox.listen %q: want HOST:PORT, or %s", a.Listen, AgentSandboxOff)
		}
	}
	if a.URL != "" {
		if u, err := url.Parse(a.URL); err != nil || u.Scheme != "https" || u.Host == "" {
			return fmt.Errorf("agent_sandbox.url %q: want a URL such as https://cove.example.com:7445", a.URL)
		}
	}
	switch {
	case (a.Cert == "") != (a.Key == ""):
		return errors.New("agent_sandbox.cert and agent_sandbox.key belong together")
	case a.CA != "" && a.Cert == "":
		return errors.New("agent_sandbox.ca is about agent_sandbox.cert, which is not given")
	}
	wrong := slices.IndexFunc(a.Names, func(name string) bool { return !domainName.MatchString(name) && net.ParseIP(name) == nil })
	if wrong >= 0 {
		return fmt.Errorf("agent_sandbox.names: %q is neither a name in lower case nor an address", a.Names[wrong])
	}
	return nil
}
