package kubernetes_test

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/rest"
)

// api is an API server as far as the driver can tell: objects with versions, watches, and patches that test what they change.
type api struct {
	*httptest.Server

	mu       sync.Mutex
	version  int
	objects  map[string]object // resource/name
	history  []event           // of Pods
	changed  chan struct{}
	requests map[string]int // "PATCH pods" → how often
	refuse   func(r *http.Request) int
}

type object = map[string]any

type event struct {
	version int
	kind    string
	object  json.RawMessage
	labels  map[string]any
}

func newAPI(t *testing.T) *api {
	t.Helper()
	a := &api{objects: map[string]object{}, changed: make(chan struct{}), requests: map[string]int{}}
	a.Server = httptest.NewServer(a)
	t.Cleanup(func() {
		a.CloseClientConnections()
		a.Close()
	})
	return a
}

// config is a way to it that speaks JSON.
func (a *api) config() *rest.Config {
	return &rest.Config{Host: a.URL, ContentConfig: rest.ContentConfig{ContentType: "application/json"}}
}

// count is how many requests of a kind there were.
func (a *api) count(what string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.requests[what]
}

func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/readyz" {
		fmt.Fprint(w, "ok")
		return
	}
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	at := slices.Index(parts, "namespaces")
	if at < 0 || len(parts) < at+3 {
		status(w, http.StatusNotFound, "NotFound")
		return
	}
	resource, name := parts[at+2], strings.Join(parts[at+3:], "/")
	a.mu.Lock()
	a.requests[r.Method+" "+resource]++
	refuse := a.refuse
	a.mu.Unlock()
	if refuse != nil {
		if code := refuse(r); code != 0 {
			status(w, code, "")
			return
		}
	}
	if r.Method == http.MethodGet && name == "" {
		a.list(w, r, resource)
		return
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, 1<<20))
	if err != nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.one(w, r, resource, name, body)
}

func status(w http.ResponseWriter, code int, reason string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(object{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code, "message": reason})
}

// one serves a request for one object; mu is held.
func (a *api) one(w http.ResponseWriter, r *http.Request, resource, name string, body []byte) {
	found, ok := a.objects[resource+"/"+name]
	switch {
	case r.Method == http.MethodPost:
		var o object
		if json.Unmarshal(body, &o) != nil {
			status(w, http.StatusBadRequest, "BadRequest")
			return
		}
		name, _ = o["metadata"].(object)["name"].(string)
		if a.objects[resource+"/"+name] != nil {
			status(w, http.StatusConflict, "AlreadyExists")
			return
		}
		meta := o["metadata"].(object)
		meta["uid"], meta["creationTimestamp"] = "uid-"+name, time.Now().UTC().Format(time.RFC3339)
		a.put(resource, name, o, "ADDED")
		write(w, o)
	case !ok:
		status(w, http.StatusNotFound, "NotFound")
	case r.Method == http.MethodGet:
		write(w, found)
	case r.Method == http.MethodPut:
		var o object
		if json.Unmarshal(body, &o) != nil {
			status(w, http.StatusBadRequest, "BadRequest")
			return
		}
		if v, _ := o["metadata"].(object)["resourceVersion"].(string); v != "" && v != found["metadata"].(object)["resourceVersion"] {
			status(w, http.StatusConflict, "Conflict")
			return
		}
		a.put(resource, name, o, "MODIFIED")
		write(w, o)
	case r.Method == http.MethodPatch:
		o, err := patched(found, body)
		if err != nil {
			status(w, http.StatusUnprocessableEntity, "Invalid")
			return
		}
		a.put(resource, name, o, "MODIFIED")
		write(w, o)
	case r.Method == http.MethodDelete:
		var options struct{ Preconditions struct{ UID string } }
		_ = json.Unmarshal(body, &options)
		if uid := options.Preconditions.UID; uid != "" && uid != found["metadata"].(object)["uid"] {
			status(w, http.StatusConflict, "Conflict")
			return
		}
		o := clone(found)
		o["metadata"].(object)["deletionTimestamp"] = time.Now().UTC().Format(time.RFC3339)
		a.put(resource, name, o, "MODIFIED")
		write(w, o)
	}
}

func clone(o object) object {
	raw, err := json.Marshal(o)
	if err != nil {
		panic(err)
	}
	var c object
	if err := json.Unmarshal(raw, &c); err != nil {
		panic(err)
	}
	return c
}

func write(w http.ResponseWriter, o object) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(o)
}

var kinds = map[string][2]string{
	"pods": {"v1", "Pod"}, "secrets": {"v1", "Secret"}, "leases": {"coordination.k8s.io/v1", "Lease"}, "networkpolicies": {"networking.k8s.io/v1", "NetworkPolicy"},
}

// put stores an object and tells those who watch; mu is held.
func (a *api) put(resource, name string, o object, kind string) {
	a.version++
	o["apiVersion"], o["kind"] = kinds[resource][0], kinds[resource][1]
	meta := o["metadata"].(object)
	meta["resourceVersion"], meta["namespace"] = strconv.Itoa(a.version), "boxes"
	a.objects[resource+"/"+name] = o
	if kind == "DELETED" {
		delete(a.objects, resource+"/"+name)
	}
	if resource != "pods" {
		return
	}
	raw, err := json.Marshal(o)
	if err != nil {
		panic(err)
	}
	labels, _ := meta["labels"].(object)
	a.history = append(a.history, event{a.version, kind, raw, labels})
	close(a.changed)
	a.changed = make(chan struct{})
}

// change lets the kubelet write a Pod's status, or end it.
func (a *api) change(name string, f func(object) (kind string)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	found := a.objects["pods/"+name]
	if found == nil {
		return
	}
	o := clone(found)
	a.put("pods", name, o, f(o))
}

func selected(selector string, labels map[string]any) bool {
	for part := range strings.SplitSeq(selector, ",") {
		key, value, equal := strings.Cut(part, "=")
		got, ok := labels[key]
		if part != "" && (!ok || equal && got != value) {
			return false
		}
	}
	return true
}

func (a *api) list(w http.ResponseWriter, r *http.Request, resource string) {
	selector := r.URL.Query().Get("labelSelector")
	if watch, _ := strconv.ParseBool(r.URL.Query().Get("watch")); watch {
		a.watch(w, r, selector)
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	items := []object{}
	for key, o := range a.objects {
		labels, _ := o["metadata"].(object)["labels"].(object)
		if strings.HasPrefix(key, resource+"/") && selected(selector, labels) {
			items = append(items, o)
		}
	}
	slices.SortFunc(items, func(x, y object) int {
		return cmp.Compare(x["metadata"].(object)["name"].(string), y["metadata"].(object)["name"].(string))
	})
	write(w, object{"apiVersion": "v1", "kind": "PodList", "metadata": object{"resourceVersion": strconv.Itoa(a.version)}, "items": items})
}

func (a *api) watch(w http.ResponseWriter, r *http.Request, selector string) {
	from, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	w.Header().Set("Content-Type", "application/json")
	for {
		a.mu.Lock()
		var news []event
		at, _ := slices.BinarySearchFunc(a.history, from+1, func(e event, v int) int { return cmp.Compare(e.version, v) })
		news = append(news, a.history[at:]...)
		changed := a.changed
		a.mu.Unlock()
		for _, e := range news {
			from = e.version
			if selected(selector, e.labels) {
				fmt.Fprintf(w, `{"type":%q,"object":%s}`+"\n", e.kind, e.object)
			}
		}
		w.(http.Flusher).Flush()
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		}
	}
}

var errTest = errors.New("a test failed")

// patched applies a JSON patch: all of it, or nothing.
func patched(to object, body []byte) (object, error) {
	var steps []struct {
		Op, Path string
		Value    any
	}
	if err := json.Unmarshal(body, &steps); err != nil {
		return nil, err
	}
	o := clone(to)
	for _, s := range steps {
		parts := strings.Split(strings.Trim(s.Path, "/"), "/")
		for i := range parts {
			parts[i] = strings.NewReplacer("~1", "/", "~0", "~").Replace(parts[i])
		}
		at := o
		for _, part := range parts[:len(parts)-1] {
			next, ok := at[part].(object)
			if !ok {
				return nil, fmt.Errorf("no %s", part)
			}
			at = next
		}
		switch last := parts[len(parts)-1]; s.Op {
		case "test":
			if at[last] != s.Value {
				return nil, errTest
			}
		case "add", "replace":
			at[last] = s.Value
		case "remove":
			delete(at, last)
		}
	}
	return o, nil
}
