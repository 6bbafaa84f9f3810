package image

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"time"
)

// dockerConfig is the part of Docker's config file that has credentials.
type dockerConfig struct {
	Auths       map[string]dockerAuth `json:"auths"`
	CredHelpers map[string]string     `json:"credHelpers"` // registry → helper
	CredsStore  string                `json:"credsStore"`  // the helper for all others
}

type dockerAuth struct {
	Auth          string `json:"auth"` // base64 of user:password
	Username      string `json:"username"`
	Password      string `json:"password"`
	IdentityToken string `json:"identitytoken"`
	RegistryToken string `json:"registrytoken"`
}

const (
	maxDockerConfig = 1 << 20
	helperFor       = 15 * time.Second
)

// dockerCredentials are what Docker's config file has for a registry; none is no failure.
func dockerCredentials(ctx context.Context, file, registry string) (credentials, error) {
	info, err := os.Stat(file)
	if errors.Is(err, fs.ErrNotExist) {
		return credentials{}, nil
	}
	if err != nil {
		return credentials{}, err
	}
	if info.Size() > maxDockerConfig {
		return credentials{}, fmt.Errorf("%s has %d bytes", file, info.Size())
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return credentials{}, err
	}
	return parseDockerConfig(ctx, text, registry)
}

func parseDockerConfig(ctx context.Context, text []byte, registry string) (credentials, error) {
	var c dockerConfig
	if json.Unmarshal(text, &c) != nil { // its error could quote what is in the file
		return credentials{}, errors.New("it is not JSON as Docker writes it")
	}
	keys := dockerKeys(registry)
	for _, key := range keys {
		if helper := c.CredHelpers[key]; helper != "" {
			return askHelper(ctx, helper, key)
		}
	}
	for _, key := range keys {
		if a, ok := c.Auths[key]; ok && a != (dockerAuth{}) {
			return a.credentials()
		}
	}
	if c.CredsStore != "" {
		return askHelper(ctx, c.CredsStore, keys[0])
	}
	return credentials{}, nil
}

// dockerKeys are the spellings of a registry in Docker's config file; the hub's first is a historical one.
func dockerKeys(registry string) []string {
	if registry == hub {
		return []string{"https://index.docker.io/v1/", hub, hubHost, "https://" + hub, "https://" + hubHost}
	}
	return []string{registry, "https://" + registry, "https://" + registry + "/", "http://" + registry}
}

func (a dockerAuth) credentials() (credentials, error) {
	const from = "Docker's config file"
	switch {
	case a.RegistryToken != "":
		return credentials{token: a.RegistryToken, from: from}, nil
	case a.IdentityToken != "":
		return credentials{Username: tokenUser, Password: a.IdentityToken, from: from}, nil
	case a.Auth == "":
		return credentials{Username: a.Username, Password: a.Password, from: from}, nil
	}
	plain, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(a.Auth, "= \n"))
	if err != nil {
		return credentials{}, errors.New("an auth entry is not base64")
	}
	user, password, ok := strings.Cut(string(plain), ":")
	if !ok {
		return credentials{}, errors.New("an auth entry is not user:password")
	}
	return credentials{Username: user, Password: strings.TrimRight(password, "\x00"), from: from}, nil
}

var helperName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*$`)

// askHelper runs one of Docker's credential helpers, which the operator has installed and configured.
func askHelper(ctx context.Context, helper, server string) (credentials, error) {
	if !helperName.MatchString(helper) {
		return credentials{}, errors.New("the name of a credential helper is not a name")
	}
	ctx, cancel := context.WithTimeout(ctx, helperFor)
	defer cancel()
	cmd := exec.CommandContext(ctx, "docker-credential-"+helper, "get")
	cmd.Stdin = strings.NewReader(server + "\n")
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	if err != nil {
		if bytes.Contains(out, []byte("credentials not found")) { // the protocol says so, on standard output
			return credentials{}, nil
		}
		return credentials{}, fmt.Errorf("docker-credential-%s: %w", helper, err)
	}
	var answer struct{ Username, Secret string }
	if json.Unmarshal(out, &answer) != nil {
		return credentials{}, fmt.Errorf("docker-credential-%s answered something else than JSON", helper)
	}
	return credentials{Username: answer.Username, Password: answer.Secret, from: "Docker's credential helper " + helper}, nil
}
