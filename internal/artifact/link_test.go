package artifact_test

import (
	"context"
	"encoding/base64"
	"net/url"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/blob/local"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sqlstore"
)

// token makes a link of an artifact and takes the token out of it.
func token(t testing.TB, k *artifact.Keeper, a artifact.Artifact, ttl time.Duration) string {
	t.Helper()
	link, _, err := k.Link(a, ttl)
	if err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(link)
	if err != nil {
		t.Fatal(err)
	}
	return u.Query().Get("token")
}

func TestLinks(t *testing.T) {
	w := newWorld(t, defaults)
	w.put("a.txt", "a")
	w.put("b.txt", "b")
	list := w.collect("run1")
	a, b := list[0], list[1]
	redeem := func(id, token string) (fault.Kind, string) {
		t.Helper()
		got, err := w.Redeem(t.Context(), id, token)
		if err != nil {
			return fault.KindOf(err), fault.Message(err)
		}
		return "", got.ID
	}
	t.Run("S4.98 S4.107 a link is at the public address and opens its artifact for ten minutes", func(t *testing.T) {
		link, expires, err := w.Link(a, 0)
		if err != nil || !strings.HasPrefix(link, "http://files.example/artifacts/"+a.ID+"?token=") {
			t.Fatal(link, err)
		}
		if left := time.Until(expires); left < 9*time.Minute || left > 10*time.Minute {
			t.Errorf("it holds for %v", left)
		}
		if kind, id := redeem(a.ID, token(t, w.Keeper, a, 0)); id != a.ID {
			t.Error(kind, id)
		}
	})
	good := token(t, w.Keeper, a, 0)
	head, mac, _ := strings.Cut(good, ".")
	payload, err := base64.RawURLEncoding.DecodeString(head)
	if err != nil {
		t.Fatal(err)
	}
	forged := base64.RawURLEncoding.EncodeToString([]byte(strings.ReplaceAll(string(payload), a.ID, b.ID))) + "." + mac
	flipped := []byte(good)
	flipped[len(flipped)-2] = map[bool]byte{true: 'B', false: 'A'}[flipped[len(flipped)-2] == 'A']
	for what, c := range map[string]struct {
		id, token string
		kind      fault.Kind
		says      string
	}{
		"S4.102 no token":                        {a.ID, "", fault.Unauthed, "missing"},
		"S4.101 no token at all":                 {a.ID, "hello", fault.Unauthed, "malformed"},
		"S4.101 only a payload":                  {a.ID, head + ".", fault.Unauthed, "malformed"},
		"S4.101 a token that is endless":         {a.ID, strings.Repeat("x", 5000) + "." + mac, fault.Unauthed, "malformed"},
		"S4.101 a changed signature":             {a.ID, string(flipped), fault.Unauthed, "signature"},
		"S4.101 a changed payload":               {b.ID, forged, fault.Unauthed, "signature"},
		"S4.101 another artifact's token":        {b.ID, good, fault.Denied, "another artifact"},
		"S4.102 an artifact that was never here": {"art_000000000000000000000000", good, fault.NotFound, "no artifact"},
	} {
		t.Run(what, func(t *testing.T) {
			if kind, says := redeem(c.id, c.token); kind != c.kind || !strings.Contains(says, c.says) {
				t.Errorf("%s: %s", kind, says)
			}
		})
	}
	t.Run("a link holds for a second to a week", func(t *testing.T) {
		for _, ttl := range []time.Duration{-1, time.Millisecond, artifact.MaxLinkTTL + 1} {
			if _, _, err := w.Link(a, ttl); !fault.Is(err, fault.Invalid) {
				t.Error(ttl, err)
			}
		}
	})
	t.Run("S4.103 D1 links outlive a restart of the server", func(t *testing.T) {
		w.stop()
		w.start(defaults)
		if kind, id := redeem(a.ID, good); id != a.ID {
			t.Error(kind, id)
		}
	})
	t.Run("S4.103 D1 servers that share a database share links", func(t *testing.T) {
		other, err := artifact.New(t.Context(), defaults, w.blobs, w.index)
		if err != nil {
			t.Fatal(err)
		}
		defer other.Close()
		if got, err := other.Redeem(t.Context(), a.ID, good); err != nil || got.ID != a.ID {
			t.Error(err)
		}
		if kind, id := redeem(a.ID, token(t, other, a, 0)); id != a.ID {
			t.Error(kind, id)
		}
	})
	t.Run("a new key lets old links end in peace, and revoking ends them", func(t *testing.T) {
		if err := w.RotateKey(t.Context(), false); err != nil {
			t.Fatal(err)
		}
		newer := token(t, w.Keeper, a, 0)
		for _, tok := range []string{good, newer} {
			if kind, id := redeem(a.ID, tok); id != a.ID {
				t.Error(kind, id)
			}
		}
		if strings.Split(newer, ".")[0] == head {
			t.Error("it is signed with the same key")
		}
		if err := w.RotateKey(t.Context(), true); err != nil {
			t.Fatal(err)
		}
		for _, tok := range []string{good, newer} {
			if kind, says := redeem(a.ID, tok); kind != fault.Unauthed || !strings.Contains(says, "revoked") {
				t.Error(kind, says)
			}
		}
		if kind, id := redeem(a.ID, token(t, w.Keeper, a, 0)); id != a.ID {
			t.Error(kind, id)
		}
	})
	t.Run("S4.102 a link to what was removed leads nowhere", func(t *testing.T) {
		tok := token(t, w.Keeper, b, 0)
		if err := w.Remove(t.Context(), tenant, b.ID); err != nil {
			t.Fatal(err)
		}
		if kind, _ := redeem(b.ID, tok); kind != fault.NotFound {
			t.Error(kind)
		}
	})
}

// bubble is a keeper in a bubble of time: no agent, because sockets know real time only.
func bubble(t *testing.T, cfg artifact.Config) (*artifact.Keeper, *sqlstore.Store, *local.Store) {
	t.Helper()
	dir := t.TempDir()
	index, err := sqlstore.Open(filepath.Join(dir, "cove.db"))
	if err != nil {
		t.Fatal(err)
	}
	blobs, err := local.Open(filepath.Join(dir, "blobs"), local.Options{})
	if err != nil {
		t.Fatal(err)
	}
	k, err := artifact.New(t.Context(), cfg, blobs, index)
	if err != nil {
		t.Fatal(err)
	}
	return k, index, blobs
}

// add keeps a content without a sandbox.
func add(t *testing.T, index *sqlstore.Store, blobs *local.Store, id, content string, expires time.Time) artifact.Artifact {
	t.Helper()
	d, err := blobs.Draft(tenant)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Write([]byte(content)); err != nil {
		t.Fatal(err)
	}
	a := artifact.Artifact{ID: id, Tenant: tenant, Name: "f", Path: "f", MIME: "text/plain", Size: int64(len(content)), SHA256: d.Sum(),
		Created: time.Now(), Expires: expires}
	if err := index.AddArtifacts(context.Background(), []artifact.Artifact{a}, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Place(); err != nil { // after its row: nobody claims it against the sweeper here
		t.Fatal(err)
	}
	return a
}

func TestS4_100_LinksExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := defaults
		cfg.LinkTTL = time.Minute
		k, index, blobs := bubble(t, cfg)
		defer index.Close()
		defer k.Close()
		a := add(t, index, blobs, "art_1", "x", time.Time{})
		usual, longer := token(t, k, a, 0), token(t, k, a, time.Hour)
		time.Sleep(time.Minute + time.Second)
		if _, err := k.Redeem(t.Context(), a.ID, usual); !fault.Is(err, fault.Unauthed) || !strings.Contains(err.Error(), "expired") {
			t.Error("after its minute:", err)
		}
		if _, err := k.Redeem(t.Context(), a.ID, longer); err != nil {
			t.Error("one that was asked for an hour:", err)
		}
	})
}

func TestS4_125_D12_RetentionSweeps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := defaults
		cfg.SweepEvery = time.Minute
		k, index, blobs := bubble(t, cfg)
		defer index.Close()
		defer k.Close()
		short := add(t, index, blobs, "art_1", "shared", time.Now().Add(time.Hour))
		long := add(t, index, blobs, "art_2", "shared", time.Now().Add(3*time.Hour))
		forever := add(t, index, blobs, "art_3", "forever", time.Time{})
		count := func() (n int) {
			for range blobs.All() {
				n++
			}
			return n
		}
		has := func(a artifact.Artifact) bool {
			_, err := k.Get(t.Context(), tenant, a.ID)
			return err == nil
		}
		time.Sleep(30 * time.Minute)
		if !has(short) || !has(long) || count() != 2 {
			t.Error("something went before its time")
		}
		time.Sleep(32 * time.Minute)
		if has(short) || !has(long) || count() != 2 {
			t.Error("after an hour the first is gone, and the content stays for the second")
		}
		time.Sleep(2 * time.Hour)
		if has(long) || !has(forever) || count() != 1 {
			t.Error("after three hours only the last is there, and its content")
		}
	})
}
