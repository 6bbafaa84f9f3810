package image

import (
	"cmp"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/google/go-containerregistry/pkg/authn"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

// kindLogin is the kind of documents that hold a tenant's credentials, by registry.
const kindLogin = "image-login"

// tokenUser is the name that Docker gives to whoever logs in with an identity token in the place of a password.
const tokenUser = "<token>"

const maxCredential = 64 << 10 // tokens of cloud registries have several kilobytes

// credentials are for one registry.
type credentials struct {
	Username string `json:"username"`
	Password string `json:"password"`
	token    string // that a registry takes as it is; only Docker's config file has such
	from     string // where they are from, for a person
}

// String keeps them out of whatever prints them.
func (c credentials) String() string { return "credentials from " + c.from }

// GoString is for %#v.
func (c credentials) GoString() string { return c.String() }

func (c credentials) authenticator() authn.Authenticator {
	switch {
	case c.token != "":
		return authn.FromConfig(authn.AuthConfig{RegistryToken: c.token})
	case c.Username == tokenUser:
		return authn.FromConfig(authn.AuthConfig{IdentityToken: c.Password})
	case c.Username == "":
		return authn.Anonymous
	}
	return authn.FromConfig(authn.AuthConfig{Username: c.Username, Password: c.Password})
}

// credentialsFor are what a tenant has for a registry: of its login, else of Docker's config file, which is the
// operator's and for nobody else. Where they are of no use the registry is asked as its hosts will ask it.
func (s *Service) credentialsFor(ctx context.Context, tenant, registry string) (credentials, error) {
	if s.remote() && !s.cfg.Pulls.Credentials {
		return credentials{}, nil
	}
	c, err := s.login(ctx, tenant, registry)
	if err == nil || !fault.Is(err, fault.NotFound) {
		return c, err
	}
	if tenant != s.cfg.Operator || s.cfg.DockerConfig == "" {
		return credentials{}, nil
	}
	c, err = dockerCredentials(ctx, s.cfg.DockerConfig, registry)
	if err != nil {
		s.log.Warn("Docker's config file gives no credentials", "registry", registry, "error", err)
		return credentials{}, nil
	}
	return c, nil
}

// requested are credentials that came with a request.
func requested(r template.PullRequest) (credentials, error) {
	if r.Username == "" && r.Password == "" {
		return credentials{}, nil
	}
	c := credentials{Username: r.Username, Password: r.Password, from: "the request"}
	return c, c.check()
}

func (c credentials) check() error {
	switch {
	case c.Username == "" || c.Password == "":
		return fault.New(fault.Invalid, "credentials of a registry are a username and a password")
	case len(c.Username) > maxCredential || len(c.Password) > maxCredential:
		return fault.New(fault.Invalid, "credentials of a registry have at most %d bytes", maxCredential)
	}
	return nil
}

// Login keeps credentials for a registry, once the registry has taken them.
func (s *Service) Login(ctx context.Context, tenant, registry, username, password string) error {
	registry, err := parseRegistry(registry)
	if err != nil {
		return err
	}
	c := credentials{Username: username, Password: password, from: "your login"}
	if err := cmp.Or(s.canImage(), c.check(), s.canUse(c)); err != nil {
		return err
	}
	if err := s.tryLogin(ctx, tenant, registry, c); err != nil {
		return err
	}
	key, err := s.loginKey()
	if err != nil {
		return err
	}
	text, err := json.Marshal(c)
	if err != nil {
		return fmt.Errorf("login: %w", err)
	}
	// What is sealed opens only in its own place: nobody moves it to another tenant's or another registry's.
	nonce := make([]byte, key.NonceSize())
	_, _ = rand.Read(nonce) // never fails: it ends the process instead
	return s.documents.PutDocument(ctx, tenant, kindLogin, registry, key.Seal(nonce, nonce, text, place(tenant, registry)))
}

func place(tenant, registry string) []byte { return []byte(tenant + "\x00" + registry) }

// login is what Login kept; fault.NotFound: nothing.
func (s *Service) login(ctx context.Context, tenant, registry string) (credentials, error) {
	sealed, err := s.documents.Document(ctx, tenant, kindLogin, registry)
	if err != nil {
		return credentials{}, err
	}
	lost := fault.New(fault.Denied, "your login to %s cannot be read any more; log in again", registry)
	key, err := s.loginKey()
	if err != nil {
		return credentials{}, err
	}
	if len(sealed) < key.NonceSize() {
		return credentials{}, lost
	}
	text, err := key.Open(nil, sealed[:key.NonceSize()], sealed[key.NonceSize():], place(tenant, registry))
	c := credentials{from: "your login"}
	if err != nil || json.Unmarshal(text, &c) != nil {
		return credentials{}, lost
	}
	return c, nil
}

// Logout forgets the credentials for a registry.
func (s *Service) Logout(ctx context.Context, tenant, registry string) error {
	registry, err := parseRegistry(registry)
	if err != nil {
		return err
	}
	err = s.documents.DeleteDocument(ctx, tenant, kindLogin, registry)
	if fault.Is(err, fault.NotFound) {
		return fault.New(fault.NotFound, "you are not logged in to %s", registry)
	}
	return err
}

// Logins are the registries that a tenant has logged in to.
func (s *Service) Logins(ctx context.Context, tenant string) ([]string, error) {
	all, err := s.documents.Documents(ctx, tenant, kindLogin)
	if err != nil {
		return nil, err
	}
	registries := make([]string, 0, len(all))
	for _, d := range all {
		registries = append(registries, d.ID)
	}
	slices.Sort(registries)
	return registries, nil
}

// loginKey is the key that logins are kept with. It is a file beside the database and not in it, so that a copy of the
// database alone gives no credentials.
func (s *Service) loginKey() (cipher.AEAD, error) {
	raw, err := os.ReadFile(s.cfg.KeyFile)
	if errors.Is(err, fs.ErrNotExist) {
		raw, err = newKeyFile(s.cfg.KeyFile)
	}
	if err != nil {
		return nil, fmt.Errorf("key of logins: %w", err)
	}
	if len(raw) != 32 {
		return nil, fmt.Errorf("key of logins: %s has %d bytes, not 32", s.cfg.KeyFile, len(raw))
	}
	block, err := aes.NewCipher(raw)
	if err != nil {
		return nil, fmt.Errorf("key of logins: %w", err)
	}
	return cipher.NewGCM(block)
}

// keyTemp is what a key file is called before it is complete.
const keyTemp = ".registry-key-*"

// newKeyFile makes the file whole or not at all, and of two who make it at once the first wins.
func newKeyFile(file string) ([]byte, error) {
	temp, err := os.CreateTemp(filepath.Dir(file), keyTemp)
	if err != nil {
		return nil, err
	}
	defer os.Remove(temp.Name())
	key := make([]byte, 32)
	_, _ = rand.Read(key)
	_, err = temp.Write(key)
	if err := errors.Join(err, temp.Sync(), temp.Close()); err != nil {
		return nil, err
	}
	if err := os.Link(temp.Name(), file); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	return os.ReadFile(file)
}
