package auth_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sqlstore"
)

func newKeys(t *testing.T) (*auth.Keys, *counted) {
	t.Helper()
	s, err := sqlstore.Open(filepath.Join(t.TempDir(), "cove.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	store := &counted{KeyStore: s}
	return auth.NewKeys(store), store
}

// counted counts lookups and can do something right after one.
type counted struct {
	auth.KeyStore

	mu      sync.Mutex
	lookups int
	after   func()
	away    error // what all calls fail with
	touch   error // what TouchKey fails with
}

func (c *counted) TouchKey(ctx context.Context, id string, at time.Time) error {
	if err := errors.Join(c.away, c.touch); err != nil {
		return err
	}
	return c.KeyStore.TouchKey(ctx, id, at)
}

func (c *counted) RevokeKey(ctx context.Context, tenant, id string, at time.Time) error {
	if c.away != nil {
		return c.away
	}
	return c.KeyStore.RevokeKey(ctx, tenant, id, at)
}

func (c *counted) KeyByHash(ctx context.Context, hash string) (auth.KeyRecord, error) {
	r, err := c.KeyStore.KeyByHash(ctx, hash)
	if c.away != nil {
		r, err = auth.KeyRecord{}, fmt.Errorf("find key: %w", c.away)
	}
	c.mu.Lock()
	c.lookups++
	after := c.after
	c.mu.Unlock()
	if after != nil {
		after()
	}
	return r, err
}

func create(t *testing.T, keys *auth.Keys, tenant string, admin bool) (auth.Secret, auth.KeyRecord) {
	t.Helper()
	secret, record, err := keys.Create(t.Context(), tenant, "ci", admin)
	if err != nil {
		t.Fatal(err)
	}
	return secret, record
}

func TestSecret(t *testing.T) {
	secret := auth.Secret("e2b_0123456789")
	var log bytes.Buffer
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "key", secret, "in", struct{ K auth.Secret }{secret})
	asJSON, err := json.Marshal([]any{secret, struct{ K auth.Secret }{secret}})
	if err != nil {
		t.Fatal(err)
	}
	for name, printed := range map[string]string{
		"%v": fmt.Sprintf("%v", secret), "%s": fmt.Sprintf("%s", secret), "%q": fmt.Sprintf("%q", secret),
		"%x": fmt.Sprintf("%x", secret), "%#v": fmt.Sprintf("%#v", struct{ K auth.Secret }{secret}), "%d": fmt.Sprintf("%d", secret),
		"slog": log.String(), "JSON": string(asJSON), "String": secret.String(),
	} {
		t.Run("a secret prints as dots in "+name, func(t *testing.T) {
			if strings.Contains(printed, "0123") || strings.Contains(printed, fmt.Sprintf("%x", "0123")) || !strings.Contains(printed, "•") {
				t.Fatalf("printed %s", printed)
			}
		})
	}
}

func TestKeys(t *testing.T) {
	t.Run("a key has the form that SDKs check", func(t *testing.T) {
		a, err := auth.NewKey()
		b, _ := auth.NewKey()
		if err != nil || a == b || !regexp.MustCompile(`^e2b_[0-9a-f]{40}$`).MatchString(string(a)) {
			t.Fatalf("keys are %q and %q, %v", string(a), string(b), err)
		}
	})
	t.Run("S0.4 a key without its prefix is the same key", func(t *testing.T) {
		keys, _ := newKeys(t)
		secret, record := create(t, keys, "acme", false)
		digits := strings.TrimPrefix(string(secret), "e2b_")
		got, err := keys.Authenticate(t.Context(), digits)
		if want := (auth.Principal{Tenant: "acme", KeyID: record.ID}); got != want || err != nil {
			t.Fatalf("got %+v, %v", got, err)
		}
		for _, wrong := range []string{"e2b_e2b_" + digits, "E2B_" + digits, digits[1:], digits + "\n"} {
			if _, err := keys.Authenticate(t.Context(), wrong); fault.KindOf(err) != fault.Unauthed {
				t.Errorf("%q: %v", wrong, err)
			}
		}
	})
	t.Run("a key leads to its tenant", func(t *testing.T) {
		keys, _ := newKeys(t)
		secret, record := create(t, keys, "acme", true)
		other, _ := create(t, keys, "globex", false)
		got, err := keys.Authenticate(t.Context(), string(secret))
		if want := (auth.Principal{Tenant: "acme", KeyID: record.ID, Admin: true}); got != want || err != nil {
			t.Fatalf("got %+v, %v", got, err)
		}
		if got, err := keys.Authenticate(t.Context(), string(other)); got.Tenant != "globex" || got.Admin || err != nil {
			t.Fatalf("got %+v, %v", got, err)
		}
	})
	t.Run("only the hash of a key is stored", func(t *testing.T) {
		keys, _ := newKeys(t)
		secret, record := create(t, keys, "acme", false)
		list, err := keys.List(t.Context(), "acme")
		if diff := cmp.Diff([]auth.KeyRecord{record}, list); err != nil || diff != "" {
			t.Fatalf("%v %s", err, diff)
		}
		b, _ := json.Marshal(list)
		if strings.Contains(string(b), string(secret)) || strings.Contains(string(b), record.Hash) || record.Hash != auth.HashKey(secret) {
			t.Fatalf("list says %s", b)
		}
	})
	for name, presented := range map[string]string{
		"no key":                  "",
		"a key nobody made":       "e2b_" + strings.Repeat("0", 40),
		"a key of another form":   "sk-123",
		"a key with a tail":       "e2b_" + strings.Repeat("0", 41),
		"a key in capitals":       "E2B_" + strings.Repeat("A", 40),
		"a key with a line break": "e2b_" + strings.Repeat("0", 40) + "\n",
		"a key made of SQL":       "' OR 1=1 --",
	} {
		t.Run(name+" is refused", func(t *testing.T) {
			keys, _ := newKeys(t)
			create(t, keys, "acme", false)
			if _, err := keys.Authenticate(t.Context(), presented); !fault.Is(err, fault.Unauthed) {
				t.Fatalf("error is %v", err)
			}
		})
	}
	for name, tenant := range map[string]string{"empty": "", "upper case": "Acme", "a path": "../x", "long": strings.Repeat("a", 64), "dash first": "-a"} {
		t.Run("a tenant name that is "+name+" is invalid", func(t *testing.T) {
			keys, _ := newKeys(t)
			if _, _, err := keys.Create(t.Context(), tenant, "", false); !fault.Is(err, fault.Invalid) {
				t.Fatalf("error is %v", err)
			}
		})
	}
	t.Run("a revoked key is refused at once, although it was cached", func(t *testing.T) {
		keys, _ := newKeys(t)
		secret, record := create(t, keys, "acme", false)
		if _, err := keys.Authenticate(t.Context(), string(secret)); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := keys.Revoke(t.Context(), "acme", record.ID); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := keys.Authenticate(t.Context(), string(secret)); !fault.Is(err, fault.Unauthed) {
			t.Fatalf("error is %v", err)
		}
	})
	t.Run("a key revoked between lookup and cache is refused afterwards", func(t *testing.T) {
		keys, store := newKeys(t)
		secret, record := create(t, keys, "acme", false)
		store.after = func() {
			if err := keys.Revoke(t.Context(), "acme", record.ID); err != nil {
				t.Error(err)
			}
		}
		_, _ = keys.Authenticate(t.Context(), string(secret)) // began before the revocation: either answer is right
		store.after = nil
		if _, err := keys.Authenticate(t.Context(), string(secret)); !fault.Is(err, fault.Unauthed) {
			t.Fatalf("error is %v", err)
		}
	})
	t.Run("a key is good in a database that cannot be written", func(t *testing.T) {
		keys, store := newKeys(t)
		secret, _ := create(t, keys, "acme", false)
		store.touch = errors.New("database or disk is full")
		if got, err := keys.Authenticate(t.Context(), string(secret)); got.Tenant != "acme" || err != nil {
			t.Fatalf("got %+v, %v", got, err)
		}
	})
	t.Run("another tenant's key cannot be revoked", func(t *testing.T) {
		keys, _ := newKeys(t)
		secret, record := create(t, keys, "acme", false)
		if err := keys.Revoke(t.Context(), "globex", record.ID); !fault.Is(err, fault.NotFound) {
			t.Fatalf("error is %v", err)
		}
		if _, err := keys.Authenticate(t.Context(), string(secret)); err != nil {
			t.Fatal(err)
		}
	})
}

func TestCache(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		keys, store := newKeys(t)
		secret, _ := create(t, keys, "acme", false)
		for range 10 {
			if _, err := keys.Authenticate(t.Context(), string(secret)); err != nil {
				t.Fatal(err)
			}
		}
		if store.lookups != 1 {
			t.Errorf("ten uses in a minute ask the store %d times, want 1", store.lookups)
		}
		time.Sleep(2 * time.Minute)
		if _, err := keys.Authenticate(t.Context(), string(secret)); err != nil {
			t.Fatal(err)
		}
		list, err := keys.List(t.Context(), "acme")
		if err != nil {
			t.Fatal(err)
		}
		if store.lookups != 2 || !list[0].LastUsed.Equal(time.Now()) {
			t.Errorf("a use two minutes later: %d lookups, last used %v", store.lookups, list[0].LastUsed)
		}
	})
}

func TestCache_WhileTheStoreIsAway(t *testing.T) {
	away := fault.New(fault.Unavailable, "the database does not answer: try again later")
	// Each test begins with a key that is in the cache and a store that went away two minutes ago.
	for name, claim := range map[string]func(t *testing.T, keys *auth.Keys, store *counted, secret string, record auth.KeyRecord){
		"a key that was found before stays good": func(t *testing.T, keys *auth.Keys, store *counted, secret string, record auth.KeyRecord) {
			before := store.lookups
			for range 10 {
				who, err := keys.Authenticate(t.Context(), secret)
				if want := (auth.Principal{Tenant: "acme", KeyID: record.ID}); err != nil || who != want {
					t.Fatalf("%+v, %v", who, err)
				}
			}
			if asked := store.lookups - before; asked != 1 {
				t.Errorf("ten uses at once waited for the store %d times, want 1", asked)
			}
		},
		"it is good for ten minutes": func(t *testing.T, keys *auth.Keys, _ *counted, secret string, _ auth.KeyRecord) {
			time.Sleep(7 * time.Minute)
			if _, err := keys.Authenticate(t.Context(), secret); err != nil {
				t.Errorf("after nine minutes: %v", err)
			}
			time.Sleep(time.Minute)
			if _, err := keys.Authenticate(t.Context(), secret); !fault.Is(err, fault.Unavailable) {
				t.Errorf("after ten minutes: %v", err)
			}
		},
		"a key that was never seen is not let in": func(t *testing.T, keys *auth.Keys, _ *counted, _ string, _ auth.KeyRecord) {
			if _, err := keys.Authenticate(t.Context(), "e2b_"+strings.Repeat("0", 40)); !fault.Is(err, fault.Unavailable) {
				t.Error(err)
			}
		},
		"a key whose revocation failed is not let in": func(t *testing.T, keys *auth.Keys, _ *counted, secret string, record auth.KeyRecord) {
			if err := keys.Revoke(t.Context(), "acme", record.ID); !fault.Is(err, fault.Unavailable) {
				t.Fatal(err)
			}
			if _, err := keys.Authenticate(t.Context(), secret); !fault.Is(err, fault.Unavailable) {
				t.Error(err)
			}
		},
		"a revocation of another tenant takes no key away": func(t *testing.T, keys *auth.Keys, _ *counted, secret string, record auth.KeyRecord) {
			_ = keys.Revoke(t.Context(), "globex", record.ID)
			if _, err := keys.Authenticate(t.Context(), secret); err != nil {
				t.Error(err)
			}
		},
		"a key that another server revoked is refused when the store is back": func(t *testing.T, keys *auth.Keys, store *counted, secret string, record auth.KeyRecord) {
			if _, err := keys.Authenticate(t.Context(), secret); err != nil {
				t.Fatal(err)
			}
			if err := store.KeyStore.RevokeKey(t.Context(), "acme", record.ID, time.Now()); err != nil {
				t.Fatal(err)
			}
			store.away = nil
			time.Sleep(10 * time.Second)
			if _, err := keys.Authenticate(t.Context(), secret); !fault.Is(err, fault.Unauthed) {
				t.Error(err)
			}
			store.away = away
			if _, err := keys.Authenticate(t.Context(), secret); err == nil {
				t.Error("it is let in again when the store is away again")
			}
		},
		"a lookup that fails beside one that succeeds has the key's owner": func(t *testing.T, keys *auth.Keys, store *counted, secret string, record auth.KeyRecord) {
			time.Sleep(time.Hour) // the key is in no cache
			keys = auth.NewKeys(store)
			store.after = func() {
				store.after, store.away = nil, nil
				if _, err := keys.Authenticate(t.Context(), secret); err != nil {
					t.Error(err)
				}
				store.away = away
			}
			who, err := keys.Authenticate(t.Context(), secret)
			if want := (auth.Principal{Tenant: "acme", KeyID: record.ID}); err != nil || who != want {
				t.Errorf("%+v, %v", who, err)
			}
		},
		"an error that is not the store's absence lets nobody in": func(t *testing.T, keys *auth.Keys, store *counted, secret string, _ auth.KeyRecord) {
			store.away = errors.New("database disk image is malformed")
			if _, err := keys.Authenticate(t.Context(), secret); err == nil {
				t.Error("let in")
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				keys, store := newKeys(t)
				secret, record := create(t, keys, "acme", false)
				if _, err := keys.Authenticate(t.Context(), string(secret)); err != nil {
					t.Fatal(err)
				}
				store.away = away
				time.Sleep(2 * time.Minute)
				claim(t, keys, store, string(secret), record)
			})
		})
	}
	t.Run("a key that was revoked here is not let in", func(t *testing.T) {
		keys, store := newKeys(t)
		secret, record := create(t, keys, "acme", false)
		if _, err := keys.Authenticate(t.Context(), string(secret)); err != nil {
			t.Fatal(err)
		}
		if err := keys.Revoke(t.Context(), "acme", record.ID); err != nil {
			t.Fatal(err)
		}
		store.away = away
		if _, err := keys.Authenticate(t.Context(), string(secret)); err == nil {
			t.Error("let in")
		}
	})
}

func TestKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		keys, store := newKeys(t)
		secret, record := create(t, keys, "acme", false)
		ours, other := strings.TrimPrefix(string(secret), "e2b_"), strings.Repeat("0c", 20)
		for range 10 {
			if !keys.Known(t.Context(), ours) || keys.Known(t.Context(), other) {
				t.Fatal("keys and other texts are not told apart")
			}
		}
		if store.lookups != 2 {
			t.Errorf("the store was asked %d times for 2 texts", store.lookups)
		}
		if err := keys.Admit(t.Context(), auth.Secret("e2b_"+other), "acme", "chosen"); err != nil {
			t.Fatal(err)
		}
		if !keys.Known(t.Context(), other) {
			t.Error("a new key is not known because it was asked for before")
		}
		if err := keys.Revoke(t.Context(), "acme", record.ID); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Minute)
		if !keys.Known(t.Context(), ours) {
			t.Error("a revoked key is not known")
		}
		guest, err := keys.Guests("acme")
		if err != nil {
			t.Fatal(err)
		}
		if !keys.Known(t.Context(), strings.TrimPrefix(string(guest), "e2b_")) {
			t.Error("the guests' key is not known")
		}
		store.away = fault.New(fault.Unavailable, "away")
		if !keys.Known(t.Context(), strings.Repeat("0d", 20)) {
			t.Error("a text that cannot be looked up passes for no key")
		}
	})
}

func TestKnown_IsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		keys, store := newKeys(t)
		var at, most int
		var mu sync.Mutex
		count := func(change int) {
			mu.Lock()
			defer mu.Unlock()
			at += change
			most = max(most, at)
		}
		store.after = func() {
			count(1)
			time.Sleep(time.Minute)
			count(-1)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		var wait sync.WaitGroup
		for i := range 50 {
			wait.Go(func() {
				if !keys.Known(ctx, fmt.Sprintf("%040x", i)) && ctx.Err() == nil {
					t.Error("a text passes for no key before it was looked up")
				}
			})
		}
		wait.Wait()
		if most != 4 {
			t.Errorf("%d lookups at a time, want 4", most)
		}
	})
}

func TestLookalikes(t *testing.T) {
	key := strings.Repeat("0a", 20)
	for text, want := range map[string][]string{
		"": nil, key: {key}, "x" + key + "y": {key}, "e2b_" + key: {key}, key + "," + key: {key, key},
		key + "0": nil, key[1:]: nil, strings.ToUpper(key): nil, key + key[:24]: nil,
	} {
		if got := slices.Collect(auth.Lookalikes(text)); !slices.Equal(got, want) {
			t.Errorf("%q: %q", text, got)
		}
	}
}

func TestReadings(t *testing.T) {
	for text, want := range map[string][]string{
		"a b": {"a b"}, "50%": {"50%"}, "%zz%41": {"%zz%41", "%zzA"}, "%2541": {"%2541", "%41", "A"},
		"Basic YTpi":                {"Basic YTpi", "a:b"},
		"x, basic+YTpi; Basic Yw":   {"x, basic+YTpi; Basic Yw", "a:b", "c"},
		"auth=Basic%20fn5-%3D%3D":   {"auth=Basic%20fn5-%3D%3D", "auth=Basic fn5-==", "~~~"},
		"basically nothing of ours": {"basically nothing of ours"},
	} {
		if got := auth.Readings(text); !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
