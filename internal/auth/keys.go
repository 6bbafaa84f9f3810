package auth

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/hex"
	"fmt"
	"maps"
	"regexp"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/covehq/cove/internal/fault"
)

// KeyStore keeps key records. Times are exact to a microsecond.
type KeyStore interface {
	InsertKey(ctx context.Context, r KeyRecord) error
	// KeyByHash finds a key, revoked or not, or fault.NotFound.
	KeyByHash(ctx context.Context, hash string) (KeyRecord, error)
	// ListKeys returns a tenant's keys, oldest first, revoked ones too.
	ListKeys(ctx context.Context, tenant string) ([]KeyRecord, error)
	// RevokeKey marks a tenant's key; a key revoked before keeps its time; an unknown one is fault.NotFound.
	RevokeKey(ctx context.Context, tenant, id string, at time.Time) error
	TouchKey(ctx context.Context, id string, at time.Time) error
}

// How long a key that was found is trusted without asking the store again, which is also how exact LastUsed is
// and how long a key revoked by another process still works.
const cacheFor = time.Minute

// While the store is unavailable, a key that it found before stays good for staleFor since then, so
// that living sandboxes are not lost to their owners. The store is asked again after askAgain: a
// request would otherwise wait for it each time.
const (
	staleFor = 10 * time.Minute
	askAgain = 2 * time.Second
)

const maxCached = 4096

// maxAsking is how many lookups of Known the store gets at a time. Requests to public ports need no
// key, so they must not take the database from others.
const maxAsking = 4

// Keys makes, checks and revokes keys.
type Keys struct {
	store KeyStore
	guest string    // hash of the guests' key; empty: there are none. Set before anybody authenticates.
	asked Principal // who guests are

	mu       sync.Mutex
	cache    map[string]cached  // by hash
	revoke   int                // counts revocations: what was read before one is not cached after it
	known    map[string]verdict // by hash
	inserted int                // counts new keys: what Known read before one is no verdict after it
	asking   chan struct{}      // limits the lookups of Known
}

// verdict is what Known has found for a hash.
type verdict struct {
	known bool
	until time.Time
}

type cached struct {
	record KeyRecord
	until  time.Time // the store is asked after it
	stale  time.Time // the record is not used after it, though the store be away
}

// NewKeys keeps its records in store.
func NewKeys(store KeyStore) *Keys {
	return &Keys{
		store: store, cache: map[string]cached{}, known: map[string]verdict{}, asking: make(chan struct{}, maxAsking),
	}
}

// Guests makes a key that is good for the life of this process: whoever lets people in without a key shows it for them. It
// is called before anybody authenticates.
func (k *Keys) Guests(tenant string) (Secret, error) {
	key, err := NewKey()
	if err != nil {
		return "", err
	}
	k.GuestsWith(tenant, key)
	return key, nil
}

// GuestsWith lets guests in with a key that others know as well. It is set before anybody asks.
func (k *Keys) GuestsWith(tenant string, key Secret) {
	k.guest, k.asked = HashKey(key), Principal{Tenant: tenant}
}

var errWrongKey = fault.New(fault.Unauthed, "the API key is not valid")

// Authenticate turns a presented key into its owner, or fault.Unauthed. Why a key is refused is not told.
func (k *Keys) Authenticate(ctx context.Context, presented string) (Principal, error) {
	if presented == "" {
		return Principal{}, fault.New(fault.Unauthed, "an API key is needed")
	}
	digits := keyForm.FindStringSubmatch(presented)
	if digits == nil {
		return Principal{}, fault.New(fault.Unauthed, "the API key is not valid: a key is %q and 40 hexadecimal digits", keyPrefix)
	}
	hash := HashKey(Secret(keyPrefix + digits[1]))
	if k.guest != "" && Same(hash, k.guest) {
		return k.asked, nil
	}
	record, err := k.lookup(ctx, hash)
	if err != nil {
		return Principal{}, err
	}
	if record.Tenant == "" {
		// Dialects take a principal without a tenant for one that a sandbox's own token proves.
		return Principal{}, fmt.Errorf("key %q has no tenant", record.ID)
	}
	return Principal{Tenant: record.Tenant, KeyID: record.ID, Admin: record.Admin}, nil
}

func (k *Keys) lookup(ctx context.Context, hash string) (KeyRecord, error) {
	k.mu.Lock()
	hit, ok := k.cache[hash]
	seen := k.revoke
	k.mu.Unlock()
	if ok && time.Now().Before(hit.until) {
		return hit.record, nil
	}
	record, err := k.store.KeyByHash(ctx, hash)
	if fault.Is(err, fault.NotFound) {
		k.forget(hash)
		return KeyRecord{}, errWrongKey
	}
	if fault.Is(err, fault.Unavailable) {
		if stale, ok := k.extend(hash); ok {
			return stale, nil
		}
	}
	if err != nil {
		return KeyRecord{}, fmt.Errorf("look up key: %w", err)
	}
	// Both are hashes, so the index lookup told nothing of the key; this holds whatever the store's collation does.
	if subtle.ConstantTimeCompare([]byte(record.Hash), []byte(hash)) != 1 || !record.RevokedAt.IsZero() {
		k.forget(hash)
		return KeyRecord{}, errWrongKey
	}
	// LastUsed only advises: a database that is full or read-only still knows who may come in, and who may not.
	_ = k.store.TouchKey(ctx, record.ID, now())
	k.remember(record, seen)
	return record, nil
}

func (k *Keys) remember(record KeyRecord, seen int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.revoke != seen {
		return
	}
	if len(k.cache) >= maxCached {
		clear(k.cache)
	}
	at := time.Now()
	k.cache[record.Hash] = cached{record, at.Add(cacheFor), at.Add(staleFor)}
}

// extend keeps a cached key valid for askAgain while the store is unavailable. It reports false if
// the key was revoked or is older than staleFor.
//
// It returns the record that is in the cache now: a parallel lookup may have put it there after the
// caller looked.
func (k *Keys) extend(hash string) (KeyRecord, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	hit, ok := k.cache[hash]
	if !ok || !time.Now().Before(hit.stale) {
		return KeyRecord{}, false
	}
	hit.until = time.Now().Add(askAgain)
	k.cache[hash] = hit
	return hit.record, true
}

// Known reports whether digits are those of a key in the store, revoked or not, or of the guests'
// key. It authenticates no caller: it is for hiding keys. So it also reports true if the store
// fails or ctx ends first.
func (k *Keys) Known(ctx context.Context, digits string) bool {
	hash := HashKey(Secret(keyPrefix + digits))
	if k.guest != "" && Same(hash, k.guest) {
		return true
	}
	k.mu.Lock()
	_, good := k.cache[hash]
	last, asked := k.known[hash]
	inserted := k.inserted
	k.mu.Unlock()
	if good || asked && time.Now().Before(last.until) {
		return good || last.known
	}
	select {
	case k.asking <- struct{}{}:
	case <-ctx.Done():
		return true
	}
	_, err := k.store.KeyByHash(ctx, hash)
	<-k.asking
	if err != nil && !fault.Is(err, fault.NotFound) {
		return true
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if inserted != k.inserted { // it may have been made since
		return true
	}
	if len(k.known) >= maxCached {
		clear(k.known)
	}
	k.known[hash] = verdict{err == nil, time.Now().Add(cacheFor)}
	return err == nil
}

// forget takes a key out of the cache that the store knows as not good.
func (k *Keys) forget(hash string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.cache, hash)
}

// tenantName keeps a tenant usable as part of a label, a cgroup or a file name.
var tenantName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

const maxName = 128

// Create makes a key for a tenant. The Secret is told this once and never again.
func (k *Keys) Create(ctx context.Context, tenant, name string, admin bool) (Secret, KeyRecord, error) {
	key, err := NewKey()
	if err != nil {
		return "", KeyRecord{}, err
	}
	record, err := k.insert(ctx, key, tenant, name, admin)
	if err != nil {
		return "", KeyRecord{}, err
	}
	return key, record, nil
}

// Admit makes a key good that the operator chose, as an admin's of a tenant; one that is good already stays as it is. Several
// servers on one store may do it at once. A key that was revoked stays so.
func (k *Keys) Admit(ctx context.Context, key Secret, tenant, name string) error {
	if !keyForm.MatchString(string(key)) || !strings.HasPrefix(string(key), keyPrefix) {
		return fault.New(fault.Invalid, "a key is %s and 40 hex digits, such as `openssl rand -hex 20` prints", keyPrefix)
	}
	record, err := k.store.KeyByHash(ctx, HashKey(key))
	if fault.Is(err, fault.NotFound) {
		if _, err = k.insert(ctx, key, tenant, name, true); !fault.Is(err, fault.Conflict) {
			return err
		}
		record, err = k.store.KeyByHash(ctx, HashKey(key)) // another server was first
	}
	if err != nil {
		return fmt.Errorf("find key: %w", err)
	}
	if !record.RevokedAt.IsZero() {
		return fault.New(fault.Conflict, "the key %s… was revoked; choose another", record.Prefix)
	}
	return nil
}

func (k *Keys) insert(ctx context.Context, key Secret, tenant, name string, admin bool) (KeyRecord, error) {
	if !tenantName.MatchString(tenant) {
		return KeyRecord{}, fault.New(fault.Invalid, "tenant %.70q: use up to 63 of a-z, 0-9 and -, not at either end", tenant)
	}
	if utf8.RuneCountInString(name) > maxName {
		return KeyRecord{}, fault.New(fault.Invalid, "the name of a key has at most %d characters", maxName)
	}
	var id [8]byte
	if _, err := rand.Read(id[:]); err != nil {
		return KeyRecord{}, fmt.Errorf("make a key id: %w", err)
	}
	record := KeyRecord{
		ID: "key" + hex.EncodeToString(id[:]), Tenant: tenant, Name: name, Admin: admin,
		Hash: HashKey(key), Prefix: string(key[:len(keyPrefix)+6]), CreatedAt: now(),
	}
	if err := k.store.InsertKey(ctx, record); err != nil {
		return KeyRecord{}, fmt.Errorf("store key: %w", err)
	}
	k.mu.Lock()
	delete(k.known, record.Hash) // an operator's key may have been asked for before it was made
	k.inserted++
	k.mu.Unlock()
	return record, nil
}

// List returns a tenant's keys, oldest first, revoked ones too.
func (k *Keys) List(ctx context.Context, tenant string) ([]KeyRecord, error) {
	records, err := k.store.ListKeys(ctx, tenant)
	if err != nil {
		return nil, fmt.Errorf("list keys: %w", err)
	}
	return records, nil
}

// Revoke ends a tenant's key: when it returns, nothing authenticates with it. Revoking twice is no error.
func (k *Keys) Revoke(ctx context.Context, tenant, id string) error {
	err := k.store.RevokeKey(ctx, tenant, id, now())
	// A store that fails may have revoked the key all the same. Other keys stay in the cache: no tenant
	// can shorten what others have while the store is away.
	k.mu.Lock()
	defer k.mu.Unlock()
	k.revoke++
	maps.DeleteFunc(k.cache, func(_ string, c cached) bool { return c.record.ID == id && c.record.Tenant == tenant })
	if err != nil {
		return fmt.Errorf("revoke key: %w", err)
	}
	return nil
}

// now is a time that survives a store unchanged.
func now() time.Time { return time.Now().UTC().Truncate(time.Microsecond) }
