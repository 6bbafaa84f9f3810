package image_test

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/image"
	"github.com/covehq/cove/internal/template"
)

const (
	user   = "ada.lovelace"
	secret = "correct-horse"
	wrong  = "battery-staple"
)

// wantsBasic is a registry that lets ada in.
func wantsBasic(w http.ResponseWriter, r *http.Request) bool {
	if u, p, _ := r.BasicAuth(); u == user && p == secret {
		return false
	}
	w.Header().Set("WWW-Authenticate", `Basic realm="here"`)
	return complain(w, http.StatusUnauthorized, "UNAUTHORIZED")
}

// wantsBearer is one that wants a token, which ada gets.
func (p *place) wantsBearer(w http.ResponseWriter, r *http.Request) bool {
	if r.URL.Path == "/token" {
		if u, pw, ok := r.BasicAuth(); ok && (u != user || pw != secret) {
			return complain(w, http.StatusUnauthorized, "UNAUTHORIZED")
		} else if !ok {
			fmt.Fprint(w, `{"token":"strangers-token"}`)
			return true
		}
		fmt.Fprint(w, `{"token":"adas-token"}`)
		return true
	}
	switch r.Header.Get("Authorization") {
	case "Bearer adas-token":
		return false
	case "Bearer strangers-token":
		return complain(w, http.StatusForbidden, "DENIED")
	}
	w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="%s/token",service="here"`, p.URL))
	return complain(w, http.StatusUnauthorized, "UNAUTHORIZED")
}

func TestCredentials(t *testing.T) {
	for _, kind := range []string{"basic", "bearer"} {
		t.Run(kind, func(t *testing.T) {
			p := newPlace(t)
			hook := wantsBasic
			if kind == "bearer" {
				hook = p.wantsBearer
			}
			ref := p.push(t, "secret/app:v1", newImage(t, 1, 100))
			p.behave(hook)
			docker := filepath.Join(t.TempDir(), "config.json")
			must(t, os.WriteFile(docker, fmt.Appendf(nil, `{"auths":{%q:{"auth":%q}}}`, p.host(), base64.StdEncoding.EncodeToString([]byte(user+":"+secret))), 0o600))

			t.Run("a stranger is denied", func(t *testing.T) {
				w := open(t, nil)
				_, err := w.pull(acme, ref)
				wantKind(t, err, fault.Denied, "login", ref)
			})
			t.Run("those of the request", func(t *testing.T) {
				w := open(t, nil)
				_, err := w.Pull(t.Context(), globex+"x", template.PullRequest{Reference: ref, Username: user, Password: secret})
				wantKind(t, err, fault.Denied) // a loopback registry is the operator's
				_, err = w.Pull(t.Context(), acme, template.PullRequest{Reference: ref, Username: user, Password: secret})
				must(t, err)
				w.keeps(secret)
			})
			t.Run("wrong ones of the request are denied, and are not repeated", func(t *testing.T) {
				w := open(t, func(c *image.Config) { c.DockerConfig = docker })
				_, err := w.Pull(t.Context(), acme, template.PullRequest{Reference: ref, Username: user, Password: wrong})
				wantKind(t, err, fault.Denied, "the request")
				w.keeps(wrong, err)
			})
			t.Run("those of a login", func(t *testing.T) {
				w := open(t, nil)
				wantKind(t, w.Login(t.Context(), acme, p.host(), user, wrong), fault.Denied, "does not take")
				must(t, w.Login(t.Context(), acme, "http://"+p.host()+"/", user, secret))
				all, err := w.Logins(t.Context(), acme)
				if err != nil || !slices.Equal(all, []string{p.host()}) {
					t.Fatalf("%v %v", all, err)
				}
				w.reopen(nil)
				_, err = w.pull(acme, ref)
				must(t, err)
				must(t, w.Logout(t.Context(), acme, p.host()))
				wantKind(t, w.Logout(t.Context(), acme, p.host()), fault.NotFound)
				must(t, w.Remove(t.Context(), acme, ref))
				_, err = w.pull(acme, ref)
				wantKind(t, err, fault.Denied)
			})
			t.Run("those of Docker, for the operator only", func(t *testing.T) {
				w := open(t, func(c *image.Config) { c.DockerConfig, c.Insecure = docker, []string{p.host()} })
				_, err := w.pull(acme, ref)
				must(t, err)
				_, err = w.pull(globex, ref)
				wantKind(t, err, fault.Denied, "login")
			})
		})
	}
}

// keeps fails when a secret is in the log, in the database or in an error.
func (w *world) keeps(secret string, errs ...error) {
	w.t.Helper()
	if strings.Contains(w.log.String(), secret) {
		w.t.Fatal("the log has the secret")
	}
	for _, err := range errs {
		if text := fmt.Sprintf("%v %+v %#v", err, err, err); strings.Contains(text, secret) {
			w.t.Fatalf("the error has the secret: %s", text)
		}
	}
	files, err := filepath.Glob(filepath.Join(w.dir, "cove.db*"))
	must(w.t, err)
	for _, f := range files {
		raw, err := os.ReadFile(f)
		must(w.t, err)
		if strings.Contains(string(raw), secret) {
			w.t.Fatal("the database has the secret")
		}
	}
}

func TestLoginsAreSealed(t *testing.T) {
	p := newPlace(t)
	w := open(t, func(c *image.Config) { c.Insecure = []string{p.host()} })
	p.behave(wantsBasic)
	must(t, w.Login(t.Context(), acme, p.host(), user, secret))
	w.keeps(secret)
	w.keeps(user)
	sealed, err := w.store.Document(t.Context(), acme, "image-login", p.host())
	must(t, err)
	ref := p.push(t, "app:v1", newImage(t, 1, 100))
	t.Run("another tenant cannot use what is moved to it", func(t *testing.T) {
		must(t, w.store.PutDocument(t.Context(), globex, "image-login", p.host(), sealed))
		_, err := w.pull(globex, ref)
		wantKind(t, err, fault.Denied, "log in again")
	})
	t.Run("without its key it is of no use", func(t *testing.T) {
		must(t, os.Remove(filepath.Join(w.dir, "images/login.key")))
		_, err := w.pull(acme, ref)
		wantKind(t, err, fault.Denied, "log in again")
		must(t, w.Login(t.Context(), acme, p.host(), user, secret))
		_, err = w.pull(acme, ref)
		must(t, err)
	})
	info, err := os.Stat(filepath.Join(w.dir, "images/login.key"))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("%v %v", info.Mode(), err)
	}
}

func TestBadLogins(t *testing.T) {
	w, p := open(t, nil), newPlace(t)
	p.behave(func(w http.ResponseWriter, r *http.Request) bool { return complain(w, 500, "UNKNOWN") })
	for _, c := range []struct {
		registry, user, password string
		kind                     fault.Kind
	}{
		{p.host(), "", secret, fault.Invalid}, {p.host(), user, "", fault.Invalid}, {"a b", user, secret, fault.Invalid}, {"u:p@host", user, secret, fault.Invalid},
		{p.host(), user, strings.Repeat("x", 1<<20), fault.Invalid}, {p.host(), user, secret, fault.Unavailable}, {"169.254.169.254", user, secret, fault.Denied},
	} {
		err := w.Login(t.Context(), acme, c.registry, c.user, c.password)
		wantKind(t, err, c.kind)
		w.keeps(secret, err)
	}
	if all, err := w.Logins(t.Context(), acme); err != nil || len(all) != 0 {
		t.Fatalf("%v %v", all, err)
	}
}

func TestHostileTokenServer(t *testing.T) {
	w, p := open(t, nil), newPlace(t)
	for what, c := range map[string]struct {
		realm, answer string
		kind          fault.Kind
	}{
		"repeats what it was sent": {p.URL + "/token", `{"no":"` + secret + `"}`, fault.Unavailable},
		"is a metadata service":    {"http://169.254.169.254/latest/meta-data/", "", fault.Unavailable},
		"is a file":                {"file:///etc/passwd", "", fault.Unavailable},
	} {
		t.Run(what, func(t *testing.T) {
			p.behave(func(w http.ResponseWriter, r *http.Request) bool {
				if r.URL.Path == "/token" {
					fmt.Fprint(w, c.answer)
					return true
				}
				w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="%s",service="here"`, c.realm))
				return complain(w, http.StatusUnauthorized, secret)
			})
			_, err := w.Pull(t.Context(), acme, template.PullRequest{Reference: p.host() + "/app:v1", Username: user, Password: secret})
			wantKind(t, err, c.kind)
			w.keeps(secret, err)
		})
	}
}

func TestDockerConfig(t *testing.T) {
	auth := base64.StdEncoding.EncodeToString([]byte("u:p:q"))
	bin := t.TempDir()
	must(t, os.WriteFile(filepath.Join(bin, "docker-credential-fake"), []byte("#!/bin/sh\nread host\nif [ $host = none.io ]; then echo credentials not found in native keychain; exit 1; fi\necho '{\"Username\":\"helper\",\"Secret\":\"for-'$host'\"}'\n"), 0o755))
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	for _, c := range []struct{ text, registry, user, password string }{
		{`{}`, "ghcr.io", "", ""},
		{`{"auths":{"ghcr.io":{"auth":"` + auth + `"}}}`, "ghcr.io", "u", "p:q"},
		{`{"auths":{"https://ghcr.io":{"auth":"` + auth + `"}}}`, "ghcr.io", "u", "p:q"},
		{`{"auths":{"https://index.docker.io/v1/":{"auth":"` + strings.TrimRight(auth, "=") + `"}}}`, "docker.io", "u", "p:q"},
		{`{"auths":{"ghcr.io":{"identitytoken":"t"}}}`, "ghcr.io", "<token>", "t"},
		{`{"auths":{"ghcr.io":{"username":"a","password":"b"}}}`, "ghcr.io", "a", "b"},
		{`{"credHelpers":{"ghcr.io":"fake"}}`, "ghcr.io", "helper", "for-ghcr.io"},
		{`{"credHelpers":{"ghcr.io":"fake"}}`, "quay.io", "", ""},
		{`{"auths":{"quay.io":{}},"credsStore":"fake"}`, "quay.io", "helper", "for-quay.io"},
		{`{"credsStore":"fake"}`, "none.io", "", ""},
	} {
		u, p, err := image.DockerConfig(t.Context(), []byte(c.text), c.registry)
		if err != nil || u != c.user || p != c.password {
			t.Errorf("%s for %s: %q %q %v", c.text, c.registry, u, p, err)
		}
	}
	for _, text := range []string{`{`, `{"auths":{"x.io":{"auth":"%%%"}}}`, `{"auths":{"x.io":{"auth":"` + base64.StdEncoding.EncodeToString([]byte(secret)) + `"}}}`, `{"credHelpers":{"x.io":"../../bin/sh"}}`, `{"credHelpers":{"x.io":"no-such-helper"}}`} {
		if _, _, err := image.DockerConfig(t.Context(), []byte(text), "x.io"); err == nil || strings.Contains(err.Error(), secret) {
			t.Errorf("%s: %v", text, err)
		}
	}
}
