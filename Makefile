# Cove: see README.md. `make run` starts the server, `make test` passes the tests.

GO      ?= go
CC      ?= cc
GOARCH  := $(shell $(GO) env GOARCH)
VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS := -s -w -X github.com/covehq/cove/internal/app.Version=$(VERSION)

MAKER   := internal/driver/native/maker
SHELL_C := $(MAKER)/shell/shell.c $(MAKER)/shell/syscalls.h
SHIM    := kernel/native/shim-$(GOARCH).so

.DEFAULT_GOAL := build
.PHONY: acceptance prerequisites build run test test-all test-slow test-isolation test-chaos test-tenants test-e2b test-opensandbox test-agentsandbox test-python test-programs test-openapi compat e2b-lock opensandbox-lock agentsandbox-lock python-lock programs-lock openapi-lock fuzz bench bench-quick bench-turns bench-smoke bench-plot bench-e2b bench-opensandbox bench-artifacts bench-datasets bench-langgraph bench-kubernetes simulate-kubernetes docs lint clean programs image image-files manifests test-chart cluster-up cluster-down test-cluster FORCE

build: bin/cove bin/cove-agent

# The programs that bin/cove carries inside: they must exist before Go compiles it, also for go vet and go test.
programs: $(MAKER)/embedded/shell $(MAKER)/embedded/graft $(MAKER)/embedded/agent $(SHIM)

$(MAKER)/embedded/shell: $(SHELL_C)
	$(CC) -Os -static -nostdlib -ffreestanding -fno-stack-protector -fno-asynchronous-unwind-tables -fno-builtin \
		-Wall -Wextra -Werror -Wl,--build-id=none -Wl,-z,noexecstack -s -o $@ $<

$(MAKER)/embedded/graft: $(MAKER)/shell/graft.c $(MAKER)/shell/graft.ld $(MAKER)/shell/syscalls.h
	$(CC) -Os -static -nostdlib -ffreestanding -fpie -fno-stack-protector -fno-asynchronous-unwind-tables -fno-builtin \
		-fno-tree-loop-distribute-patterns -Wall -Wextra -Werror -Wl,--build-id=none -Wl,--oformat=binary -Wl,-T,$(MAKER)/shell/graft.ld -o $@ $<

bin/cove-agent: FORCE
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w' -o $@ ./cmd/cove-agent

$(MAKER)/embedded/agent: bin/cove-agent
	cmp -s $< $@ || cp $< $@

$(SHIM): kernel/native/shim.c kernel/native/serve.c kernel/native/branch.c kernel/native/shim.h
	$(CC) -O2 -shared -fPIC -Wall -Wextra -Werror -o $@ kernel/native/shim.c kernel/native/serve.c kernel/native/branch.c

bin/cove: programs FORCE
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o $@ ./cmd/cove

FORCE:

# Starting a sandbox needs root for one small process, the maker; the server itself gives root up.
run: build
	@if [ "$$(id -u)" = 0 ]; then exec ./bin/cove serve; \
	else echo "Cove asks for root: its maker makes namespaces, mounts and cgroups. The server drops all privilege."; exec sudo ./bin/cove serve; fi

# Says within a second what this machine lacks to run the tests.
prerequisites:
	@test/prerequisites

# Every part of the product with real sandboxes, and a first look with each SDK. The first run also builds the templates
# that the tests share. Packages wait more than they compute, so two more run at a time than there are
# processors.
test: prerequisites build
	$(GO) vet ./...
	$(GO) test -short -timeout 60m -p $$(($$(nproc) + 2)) ./...

# What `make test` leaves out because it takes minutes: the published SDKs whole, a full disk below
# durable storage, the memory of stalled readers, the builds of templates, the largest forks and
# snapshots.
test-slow: programs
	$(GO) test -count=1 -timeout 60m -run "$$(test/slow/names pattern)" $$(test/slow/names packages)

# Both and more: the race detector, a thousand create/run/kill cycles, a gigabyte of output. The faults of running servers and
# the two tenants come last, each on its own: they measure how long requests take.
test-all: prerequisites build
	COVE_LEAK_CYCLES=1000 COVE_E2E_FULL=1 $(GO) test -race -timeout 90m ./...
	$(MAKE) test-chaos
	$(MAKE) test-tenants

# Everything a sandbox must refuse, tried from inside.
test-isolation: programs
	$(GO) test -count=1 -v -run 'TestIsolation|TestTrust|TestOutOfMemory' ./internal/driver/native

# Faults of running servers: what clients see, how long until service, what is lost, what is left over. Needs root; bin/chaos.json has the table.
test-chaos: programs
	mkdir -p bin
	COVE_CHAOS=1 $(GO) test -count=1 -v -timeout 25m ./test/chaos

# Every route of every dialect, as its owner and as another tenant: nothing is seen, used or changed, and one tenant's worst
# leaves the other its share. Needs root; prints a table. Seven minutes on two processors that are busy with other things.
test-tenants: programs
	COVE_TENANTS=1 $(GO) test -count=1 -v -timeout 25m ./test/tenants

# The published E2B SDKs, unmodified, against a server; the first run installs them from the lock files.
test-e2b: programs
	$(GO) test -count=1 -v -timeout 60m -run 'TestE2B' ./e2e

# The published OpenSandbox packages, unmodified, against a server, a registry and the example of LangGraph.
test-opensandbox: programs
	$(GO) test -count=1 -v -timeout 60m -run 'TestOpenSandbox' ./e2e

# The published clients of agent-sandbox in three versions, straight and through kubectl, and the adapter for LangChain.
test-agentsandbox: programs
	$(GO) test -count=1 -v -timeout 60m -run 'TestAgentSandbox' ./e2e

# The Python package: its client, and the tools for LangChain, LangGraph and deepagents in two versions.
test-python: programs
	$(GO) test -count=1 -v -timeout 60m -run 'TestPython' ./e2e

# Published programs of others, unmodified, with the integrations that they have for E2B and OpenSandbox. The first run installs them.
test-programs: programs
	COVE_PROGRAMS=1 $(GO) test -count=1 -v -timeout 90m -run 'TestPrograms' ./e2e

# What the OpenAPI document says against what the server does, by schemathesis. COVE_OPENAPI_SEED=N tries other requests.
test-openapi: programs
	$(GO) test -count=1 -v -timeout 60m -run 'TestOpenAPI' ./e2e

# The two of E2B and OpenSandbox, and the tables of docs/compatibility.md from what they said.
compat: programs
	mkdir -p bin
	rm -f bin/e2b.jsonl bin/opensandbox.jsonl
	E2B_SUITE_REPORT=$(CURDIR)/bin/e2b.jsonl OPENSANDBOX_SUITE_REPORT=$(CURDIR)/bin/opensandbox.jsonl \
		$(GO) test -count=1 -timeout 60m -run 'TestE2B|TestOpenSandbox' ./e2e

# Every suite, and docs/acceptance.md and .json from what it said: which test proves which promise.
acceptance: programs image
	rm -rf bin/acceptance
	mkdir -p bin/acceptance
	-E2B_SUITE_REPORT=$(CURDIR)/bin/acceptance/e2b.jsonl OPENSANDBOX_SUITE_REPORT=$(CURDIR)/bin/acceptance/opensandbox.jsonl \
		AGENTSANDBOX_SUITE_REPORTS=$(CURDIR)/bin/acceptance COVE_ACCEPTANCE_REPORT=$(CURDIR)/bin/acceptance/python.jsonl $(GO) test -count=1 -json -timeout 60m ./... > bin/acceptance/go.json
	-COVE_E2E_FULL=1 $(GO) test -count=1 -json -timeout 60m -run 'ThroughACollector$$' ./e2e > bin/acceptance/collector.json
	-COVE_CLUSTER_OPTIONAL=1 COVE_CLUSTER_REPORT=$(CURDIR)/bin/acceptance/cluster.json test/cluster/run
	COVE_ACCEPTANCE=$(CURDIR)/bin/acceptance $(GO) test -count=1 -run TestTheReportIsWritten ./e2e/acceptance

# The newest versions into the lock files. Needs uv and npm.
e2b-lock:
	cd e2e/e2b/python && uv pip compile --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links \
		--no-header --no-annotate --quiet requirements.txt --output-file requirements.lock
	cd e2e/e2b/js && npm install --package-lock-only --ignore-scripts --save-exact e2b@latest @e2b/code-interpreter@latest @e2b/cli@latest

opensandbox-lock:
	cd e2e/opensandbox/python && uv pip compile --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links \
		--no-header --no-annotate --quiet requirements.txt --output-file requirements.lock
	cd e2e/opensandbox/june && uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links \
		--no-header --no-annotate --quiet requirements.txt --output-file requirements.lock
	cd e2e/opensandbox/js && npm install --package-lock-only --ignore-scripts --save-exact @alibaba-group/opensandbox@latest

agentsandbox-lock:
	for d in v04:3.11:--no-deps v05:3.11:--no-deps newest:3.11:--upgrade langchain:3.12:--upgrade; do (IFS=:; set -- $$d; cd e2e/agentsandbox/$$1 && \
		uv pip compile $$3 --universal --python-version $$2 --generate-hashes --no-emit-index-url --no-emit-find-links \
		--no-header --no-annotate --quiet requirements.txt --output-file requirements.lock) || exit; done

python-lock:
	cd python && uv pip compile --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links \
		--no-header --no-annotate --quiet requirements.txt --output-file requirements.lock
	cd python/tests/deepagents06 && uv pip compile --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links \
		--no-header --no-annotate --quiet requirements.txt --output-file requirements.lock
	cd python/tests/dcode && uv pip compile --upgrade --no-deps --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links \
		--no-header --no-annotate --quiet requirements.txt --output-file requirements.lock

programs-lock:
	for d in e2e/programs/*/; do (cd $$d && uv pip compile --upgrade --universal --python-version 3.12 --generate-hashes --no-emit-index-url --no-emit-find-links \
		--no-header --no-annotate --quiet requirements.txt --output-file requirements.lock) || exit; done

openapi-lock:
	cd e2e/openapi && uv pip compile --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links \
		--no-header --no-annotate --quiet requirements.txt --output-file requirements.lock

FUZZTIME ?= 60s
fuzz: programs
	@set -e; grep -rHoE '^func Fuzz[A-Za-z0-9_]+' --include='*_test.go' . | sort | while IFS=: read -r file name; do \
		echo "== $$(dirname $$file) $${name#func }"; \
		$(GO) test -run '^$$' -fuzz "^$${name#func }$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 10x $$(dirname $$file); \
	done

bench-quick: build
	$(GO) run ./bench

# Two versions in turns: `make bench-turns BEFORE=COMMIT` measures that commit and what is checked out here. Each has templates
# of its own.
ROUNDS ?= 5
bench-turns: build
	@test -n "$(BEFORE)" || { echo "say which version to compare with: make bench-turns BEFORE=COMMIT" >&2; exit 2; }
	$(GO) build -o bin/bench ./bench
	bench/turns "$(BEFORE)" $(ROUNDS)

# Every scenario, and the same jobs with docker, runc, crun, bubblewrap and plain processes: up to half an hour.
bench: build
	$(GO) run ./bench -full

# The same with two samples each: shows that it works and measures nothing.
bench-smoke: build
	$(GO) run ./bench -full -smoke -out bin/bench-smoke

# Through the official E2B SDK for Python, against the same SDK on a server that does nothing.
bench-e2b: programs
	COVE_E2B_BENCH=$(CURDIR)/bench/results/e2b.json $(GO) test -count=1 -v -timeout 30m -run 'TestE2BBench$$' ./e2e

# Through OpenSandbox's SDK for Python, beside a Docker engine with the same image: create, commands, twenty at once, memory, unpacking.
bench-opensandbox: programs
	COVE_OPENSANDBOX_BENCH=$(CURDIR)/bench/results/opensandbox.json $(GO) test -count=1 -v -timeout 30m -run 'TestOpenSandboxBench$$' ./e2e

# Twenty-two sessions over one dataset of a gigabyte: how often the page cache holds it.
bench-datasets: programs
	COVE_DATASETS_BENCH=$(CURDIR)/bench/results/datasets.json $(GO) test -count=1 -v -timeout 10m -run 'TestDatasetsBench$$' ./e2e

# Keeping files beside cp and sha256sum of the same files: a thousand small ones, and one of a gigabyte.
bench-artifacts: programs
	COVE_ARTIFACTS_BENCH=$(CURDIR)/bench/results/artifacts.json $(GO) test -count=1 -v -timeout 20m -run 'TestArtifactsBench$$' ./e2e

# A call of LangGraph's ToolNode to its answer, beside a fresh Python process for the same code.
bench-langgraph: programs
	COVE_LANGGRAPH_BENCH=$(CURDIR)/bench/results/langgraph.json $(GO) test -count=1 -v -timeout 10m -run 'TestLangGraphBench$$' ./e2e

# A claim to its first command, with a Pod that waits and without, on a real cluster; what the API server writes; claims a second.
bench-kubernetes: image
	test/cluster/with $(GO) run ./bench kubernetes

# Servers that claim Pods of a large cluster, whose nodes are played: a real API server, and numbers for docs/scale.md.
simulate-kubernetes:
	mkdir -p bin
	$(GO) build -o bin/cluster ./test/cluster
	$(GO) run ./bench/scale

# The picture and the tables of README.md and docs/performance.md, from bench/results/peers.json.
bench-plot:
	bench/plot

# What is generated from the code for people to read; tests say when it is stale.
docs: programs
	$(GO) test -count=1 -run TheOpenAPIFileIsCurrent ./internal/dialect/cove -update
	$(GO) test -count=1 -run TheDocsAreCurrent ./internal/cli -update

# Cove's own image as an archive, without Docker and without pulling anything: docker load, ctr images import and the like take it.
IMAGE ?= cove:dev
image: bin/cove-image.tar

bin/cove-pod: programs FORCE
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w' -o $@ ./cmd/cove-pod

# The same files for deploy/Dockerfile: two static programs, and whom to trust on the internet.
CERTS := /etc/ssl/certs/ca-certificates.crt
image-files: bin/cove bin/cove-pod
	rm -rf bin/image
	install -d bin/image$(dir $(CERTS))
	install -d -m 1777 bin/image/tmp bin/image/var/lib/cove
	cp bin/cove bin/cove-pod bin/image/
	cp $(CERTS) bin/image$(CERTS)

bin/cove-image.tar: bin/cove bin/cove-pod
	$(GO) run ./deploy/image -o $@ -tag $(IMAGE) -user 65532:65532 -env SSL_CERT_FILE=$(CERTS) -entrypoint /cove -cmd serve \
		-dir /tmp -dir /var/lib/cove $(CERTS)=$(CERTS) bin/cove=/cove bin/cove-pod=/cove-pod

# The plain manifests from the chart; a test says when they are stale.
manifests:
	cd test/chart && $(GO) test -count=1 -run TestTheManifestsAreTheChart . -args -update

# The chart, rendered as helm renders it. A module of its own: the server needs nothing of helm.
test-chart:
	cd test/chart && $(GO) test .

# A real Kubernetes on this machine, in a network namespace of its own: needs root, builds Kubernetes once (ten minutes).
cluster-up:
	$(GO) run ./test/cluster up

cluster-down:
	$(GO) run ./test/cluster down

# The driver's contract, the SDKs and the faults on that cluster, with Cove outside and inside of it.
test-cluster: build
	test/cluster/run

LINT := bin/golangci-lint
$(LINT):
	GOBIN=$(CURDIR)/bin $(GO) install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.14.0
lint: programs $(LINT)
	$(LINT) run ./...

clean:
	rm -rf bin $(MAKER)/embedded/shell $(MAKER)/embedded/graft $(MAKER)/embedded/agent kernel/native/*.so
