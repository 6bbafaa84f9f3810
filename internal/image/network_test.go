package image_test

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/image"
	"github.com/covehq/cove/internal/template"
)

func TestAddresses(t *testing.T) {
	for address, want := range map[string]bool{
		"1.1.1.1": true, "10.0.0.1": true, "192.168.1.1": true, "2606:4700::1111": true, "64:ff9b::101:101": true,
		"169.254.169.254": false, "169.254.0.1": false, "fe80::1": false, "fe80::1%eth0": false, "0.0.0.0": false, "::": false, "::ffff:169.254.169.254": false,
		"fd00:ec2::254": false, "100.100.100.200": false, "168.63.129.16": false, "192.0.0.192": false, "224.0.0.1": false, "ff02::1": false,
		"64:ff9b::a9fe:a9fe": false, "2002:a9fe:a9fe::1": false, "::169.254.169.254": false, "127.0.0.1": false, "::1": false, "64:ff9b::7f00:1": false,
		"64:ff9b:1::101:101": true, "64:ff9b:1:101:1:100::": true, "64:ff9b:1::a9fe:a9fe": false, "64:ff9b:1:a9fe:a9:fe00::": false, "64:ff9b:1:a9:fe:a9fe::": false,
		"64:ff9b:1:0:a9:fea9:fe00::": false, "64:ff9b:1::7f00:1": false, "64:ff9b:1::": false,
	} {
		if err := image.CheckAddress(netip.MustParseAddr(address), false); (err == nil) != want {
			t.Errorf("%s: %v", address, err)
		}
	}
	for _, loopback := range []string{"127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"} {
		if err := image.CheckAddress(netip.MustParseAddr(loopback), true); err != nil {
			t.Errorf("%s: %v", loopback, err)
		}
	}
}

// TestAddresses_OfThisHost serves a registry on an address of an interface, where other services of
// the host listen too.
func TestAddresses_OfThisHost(t *testing.T) {
	own, err := net.InterfaceAddrs()
	must(t, err)
	for _, o := range own {
		p, err := netip.ParsePrefix(o.String())
		must(t, err)
		a := p.Addr().Unmap()
		if a.IsLoopback() || a.IsLinkLocalUnicast() {
			continue
		}
		if err := image.CheckAddress(a, false); err == nil {
			t.Errorf("%s is this host's and a tenant may go there", a)
		}
		if err := image.CheckAddress(a, true); err != nil {
			t.Errorf("%s, which the operator has named: %v", a, err)
		}
	}
	if os.Geteuid() != 0 {
		t.Skip("an interface is made as root only")
	}
	link := fmt.Sprintf("cvo%d", os.Getpid())
	run(t, "ip", "link", "add", link, "type", "veth", "peer", "name", link+"p")
	defer run(t, "ip", "link", "del", link)
	run(t, "ip", "address", "add", "198.51.100.1/32", "dev", link)
	for address, want := range map[string]bool{"198.51.100.2": true, "198.51.100.1": false, "64:ff9b::c633:6401": false} {
		if err := image.CheckAddress(netip.MustParseAddr(address), false); (err == nil) != want {
			t.Errorf("%s: %v", address, err)
		}
	}
}

func run(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %v: %v %s", name, args, err, out)
	}
}

func TestRefusedRegistries(t *testing.T) {
	w, p := open(t, nil), newPlace(t)
	for _, ref := range []string{"169.254.169.254/latest/meta-data:v1", "[fe80::1]:5000/app:v1", "0.0.0.0:5000/app:v1", "[::ffff:169.254.169.254]:80/app:v1", "100.100.100.200/a/b:v1"} {
		_, err := w.pull(acme, ref)
		wantKind(t, err, fault.Denied, "does not talk to")
	}
	ref := p.push(t, "app:v1", newImage(t, 1, 100))
	t.Run("this host's loopback is the operator's", func(t *testing.T) {
		_, err := w.pull(globex, ref)
		wantKind(t, err, fault.Denied, "does not talk to")
		w.reopen(func(c *image.Config) { c.Insecure = []string{p.host()} })
		_, err = w.pull(globex, ref)
		must(t, err)
	})
	t.Run("a layer is not fetched from where nobody may go", func(t *testing.T) {
		for _, to := range []string{"http://169.254.169.254/x", "https://169.254.169.254/x", "http://10.1.2.3:1/x"} {
			w := open(t, nil)
			p.behave(func(w http.ResponseWriter, r *http.Request) bool {
				if !isPart(r) {
					return false
				}
				http.Redirect(w, r, to, http.StatusTemporaryRedirect)
				return true
			})
			_, err := w.pull(acme, ref)
			wantKind(t, err, fault.Denied)
		}
	})
	t.Run("redirects end", func(t *testing.T) {
		w := open(t, nil)
		p.forget()
		p.behave(func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.Contains(r.URL.Path, "/manifests/") {
				return false
			}
			http.Redirect(w, r, r.URL.Path+"x", http.StatusTemporaryRedirect)
			return true
		})
		_, err := w.pull(acme, ref)
		wantKind(t, err, fault.Unavailable)
		if n := len(p.asked("/manifests/")); n > 10 {
			t.Fatalf("%d redirects", n)
		}
	})
}

// elsewhere is an address of this host that is not its loopback.
func elsewhere(t *testing.T) string {
	all, err := net.InterfaceAddrs()
	must(t, err)
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil && !n.IP.IsLoopback() && !n.IP.IsLinkLocalUnicast() {
			return n.IP.String()
		}
	}
	t.Skip("this host has no address but its loopback")
	return ""
}

// What a registry out there says about where to go next does not lead to this host, not for its operator either.
func TestRegistriesDoNotSendUsToOurselves(t *testing.T) {
	var reached atomic.Int32
	victim := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached.Add(1) }))
	t.Cleanup(victim.Close)
	for name, answer := range map[string]func(http.ResponseWriter, *http.Request){
		"by a redirect of the first question": func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, victim.URL+"/admin/shutdown", http.StatusFound)
		},
		"by the place of tokens": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("WWW-Authenticate", `Bearer realm="`+victim.URL+`/token",service="x"`)
			w.WriteHeader(http.StatusUnauthorized)
		},
	} {
		t.Run(name, func(t *testing.T) {
			l, err := net.Listen("tcp", net.JoinHostPort(elsewhere(t), "0"))
			must(t, err)
			hostile := &http.Server{Handler: http.HandlerFunc(answer)}
			go hostile.Serve(l)
			t.Cleanup(func() { hostile.Close() })
			w := open(t, func(c *image.Config) {
				c.Insecure = []string{l.Addr().String(), strings.TrimPrefix(victim.URL, "http://")}
			})
			for _, tenant := range []string{acme, globex} {
				if _, err := w.pull(tenant, l.Addr().String()+"/app:v1"); err == nil || reached.Load() != 0 {
					t.Fatalf("%d requests reached this host: %v", reached.Load(), err)
				}
			}
		})
	}
}

func TestPlainHTTP(t *testing.T) {
	host := elsewhere(t)
	p := newPlace(t)
	l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	must(t, err)
	other := &http.Server{Handler: p}
	go other.Serve(l)
	t.Cleanup(func() { other.Close() })
	p.push(t, "app:v1", newImage(t, 1, 100))
	ref := l.Addr().String() + "/app:v1"
	w := open(t, nil)
	_, err = w.Pull(t.Context(), acme, template.PullRequest{Reference: ref, Username: user, Password: secret})
	wantKind(t, err, fault.Denied, "insecure_registries")
	for _, r := range p.asked("") {
		if r.Header.Get("Authorization") != "" {
			t.Fatal("credentials were sent without TLS")
		}
	}
	for _, insecure := range []string{l.Addr().String(), host} {
		w = open(t, func(c *image.Config) { c.Insecure = []string{insecure} })
		_, err = w.pull(globex, ref)
		must(t, err)
	}
}

func TestCertificates(t *testing.T) {
	p := newPlace(t)
	s := httptest.NewUnstartedServer(p)
	s.Config.ErrorLog = quiet
	s.StartTLS()
	t.Cleanup(s.Close)
	p.push(t, "app:v1", newImage(t, 1, 100))
	host := strings.TrimPrefix(s.URL, "https://")
	w := open(t, nil)
	_, err := w.pull(acme, host+"/app:v1")
	wantKind(t, err, fault.Unavailable, "certificate")
	w = open(t, func(c *image.Config) { c.Insecure = []string{host} })
	_, err = w.pull(acme, host+"/app:v1")
	must(t, err)
}

func TestMirrors(t *testing.T) {
	img := newImage(t, 2, 1000)
	origin, mirror := newPlace(t), newPlace(t)
	ref := origin.push(t, "team/app:v1", img)
	mirror.push(t, "proxy/team/app:v1", img)
	mirrored := func(c *image.Config) { c.Mirrors = map[string][]string{origin.host(): {mirror.URL + "/proxy"}} }
	t.Run("a mirror is asked first, without what is for the registry", func(t *testing.T) {
		w := open(t, mirrored)
		origin.forget()
		info, err := w.Pull(t.Context(), acme, template.PullRequest{Reference: ref, Username: user, Password: secret})
		must(t, err)
		if info.Reference != ref || len(origin.asked("")) != 0 {
			t.Fatalf("%+v with %d requests to its registry", info, len(origin.asked("")))
		}
		for _, r := range mirror.asked("") {
			if r.Header.Get("Authorization") != "" {
				t.Fatal("the mirror got credentials")
			}
		}
	})
	t.Run("a layer that the mirror lacks comes from the registry", func(t *testing.T) {
		w := open(t, mirrored)
		blob, _, _ := firstLayer(t, img)
		mirror.behave(func(w http.ResponseWriter, r *http.Request) bool {
			return strings.HasSuffix(r.URL.Path, blob.String()) && complain(w, 404, "BLOB_UNKNOWN")
		})
		origin.forget()
		_, err := w.pull(acme, ref)
		must(t, err)
		if n := len(origin.asked("GET /v2/team/app/blobs/")); n != 1 {
			t.Fatalf("%d layers from the registry", n)
		}
	})
	t.Run("an image that the mirror lacks comes from the registry", func(t *testing.T) {
		w := open(t, mirrored)
		for _, status := range []int{404, 401, 500} {
			mirror.behave(func(w http.ResponseWriter, r *http.Request) bool { return complain(w, status, "NO") })
			_, err := w.pull(acme, ref)
			must(t, err)
		}
	})
	t.Run("a mirror may be gone", func(t *testing.T) {
		w := open(t, mirrored)
		mirror.Close()
		_, err := w.pull(acme, ref)
		must(t, err)
	})
	for _, bad := range []string{"", "http://", "host?x", "user@host"} {
		if _, err := image.Open(image.Config{Dir: t.TempDir(), Mirrors: map[string][]string{"docker.io": {bad}}}, nil, nil, nil, discard); !fault.Is(err, fault.Invalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// A signed address of a layer's real place is a secret for as long as it is good.
func TestSignedAddressesStayOutOfErrors(t *testing.T) {
	w, p := open(t, nil), newPlace(t)
	dead, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	dead.Close()
	ref := p.push(t, "app:v1", newImage(t, 1, 100))
	p.behave(func(w http.ResponseWriter, r *http.Request) bool {
		if !isPart(r) {
			return false
		}
		http.Redirect(w, r, fmt.Sprintf("http://%s/x?signature=%s", dead.Addr(), secret), http.StatusTemporaryRedirect)
		return true
	})
	_, err = w.pull(acme, ref)
	wantKind(t, err, fault.Unavailable)
	w.keeps(secret, err)
}
