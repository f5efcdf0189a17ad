# GPUaaS Mesh. `make` alone lists the targets.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

GO      ?= go
# Without the names of directories in them, what one clone has compiled is taken from the build cache by the next.
export GOFLAGS := $(filter-out -trimpath,$(shell $(GO) env GOFLAGS)) -trimpath
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -X github.com/gpuaas/mesh/internal/obs.stamped=$(VERSION)

# Before what needs Postgres or Redis: what stands in a cache is found too.
ENV := source scripts/env.sh;

# A tool is rebuilt only when its module files change: the stamp carries their
# hash. Each tool stands in a module of its own, so that its graph never moves
# the product's versions.
stamp = bin/.$(1)-$(shell cat internal/tools/$(1)/go.mod internal/tools/$(1)/go.sum | sha256sum | cut -c1-16)
BUF    := $(call stamp,buf)
LINTER := $(call stamp,golangci-lint)
GRPCURL := $(call stamp,grpcurl)

# $(1) name, $(2) package
define build_tool
	@echo "building bin/$(1) (once for each version)"
	@mkdir -p bin
	@$(GO) build -C internal/tools/$(1) -o ../../../bin/$(1) $(2)
	@rm -f bin/.$(1)-* && touch $@
endef

##@ Run

.PHONY: dev
dev: build postgres redis ## Bring up the whole mesh on this machine (flags: ARGS="--nodes 5")
	@$(ENV) exec bin/gpuaas dev $(ARGS)

.PHONY: build
build: ## Build bin/gpuaas and bin/gpuaas-node-agent
	@mkdir -p bin
	$(GO) build -ldflags '$(LDFLAGS)' -o bin/ ./cmd/gpuaas ./cmd/gpuaas-node-agent

##@ Check

.PHONY: test
test: deps $(BUF) $(GRPCURL) ## Every test, under the race detector
	@scripts/test.sh

.PHONY: test-long
test-long: deps ## The tests that repeat what they claim, for as long as it is worth once in a while
	@scripts/test-long.sh

.PHONY: fuzz
fuzz: ## Every fuzzer, a minute each (ARGS="./internal/bundle")
	@scripts/fuzz.sh $(ARGS)

.PHONY: check
check: $(BUF) $(LINTER) ## What is checked without running it: the release build, lint with vet, generated code
	@scripts/check.sh

.PHONY: tools
tools: $(BUF) $(LINTER) $(GRPCURL) ## Build the tools that test and check need

.PHONY: test-fast
test-fast: ## The tests without I/O, in seconds (ARGS="./internal/fault/...")
	@scripts/gotest.sh -short $(or $(ARGS),./...)

.PHONY: lint
lint: $(LINTER) $(BUF) ## Lint the Go code and the proto files
	@scripts/lint.sh $(or $(ARGS),./...)
	bin/buf lint

.PHONY: gen-check
gen-check: $(BUF) ## Fail if generated code is not what the sources generate, or a proto change breaks the wire
	@scripts/gen-check.sh

.PHONY: bench
bench: build postgres redis ## Measure against the raw baselines (ARGS="streams --agents 5000")
	@$(ENV) exec bin/gpuaas bench $(or $(ARGS),all)

.PHONY: peers
peers: build ## Build the other engines for `gpuaas bench peers`
	$(GO) build -C bench/peers -o ../../bin/gpuaas-bench-peers .

.PHONY: drill
drill: build postgres redis ## Run the failure drills (ARGS="ca-restart-drift")
	@$(ENV) exec bin/gpuaas drill run $(or $(ARGS),--all)

##@ Change

.PHONY: gen
gen: $(BUF) ## Regenerate the code of proto/
	@scripts/gen.sh

.PHONY: first-hour
first-hour: postgres ## Record docs/first-hour.md anew
	@$(ENV) GPUAAS_UPDATE_GOLDEN=1 $(GO) test -count=1 ./mesh/firsthour -run TestTheFirstHour

.PHONY: runbooks
runbooks: ## Make docs/runbooks anew from the catalogue of reasons
	@$(ENV) GPUAAS_UPDATE_GOLDEN=1 $(GO) test -count=1 ./services/recovery/drift -run TestRunbooks

.PHONY: fmt
fmt: $(LINTER) ## Format the Go code (ARGS="./services/nodeapi/...")
	bin/golangci-lint fmt $(or $(ARGS),./...)

##@ Prepare

.PHONY: deps
deps: ## Install what the tests need and this machine lacks (as root by apt-get, else into a cache)
	@scripts/deps.sh

.PHONY: postgres
postgres: ## Put Postgres into the cache if this machine has none
	@scripts/postgres.sh

.PHONY: redis
redis: ## Install redis-server if this machine has none, or say that an imitation does instead
	@scripts/deps.sh redis-server || echo "without redis-server an imitation in the process serves the locks" >&2

.PHONY: tools
tools: $(BUF) $(LINTER) $(GRPCURL) ## Build the pinned tools into bin/

$(BUF):
	$(call build_tool,buf,github.com/bufbuild/buf/cmd/buf)

# A test runs what docs/api.md shows of it.
$(GRPCURL):
	$(call build_tool,grpcurl,github.com/fullstorydev/grpcurl/cmd/grpcurl)

$(LINTER):
	$(call build_tool,golangci-lint,github.com/golangci/golangci-lint/v2/cmd/golangci-lint)

.PHONY: clean
clean: ## Remove what was built
	rm -rf bin coverage.out

.PHONY: help
help: ## List the targets
	@awk 'BEGIN { FS = ":.*## "; print "Usage: make <target> [ARGS=...]" } \
		/^##@ / { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
