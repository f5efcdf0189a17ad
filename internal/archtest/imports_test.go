package archtest

import (
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var services = []string{"services/nodeapi", "services/lifecycle", "services/recovery", "services/readmodel"}

// composers see several services at once, and nothing imports them but each
// other.
var composers = []string{"mesh", "drill", "bench", "cmd"}

// agents are the packages of the program that runs on a machine.
var agents = []string{"agent", "cmd/gpuaas-node-agent"}

// devstack runs the servers and processes of a mesh on one machine. In production others run them.
const devstack = "devstack"

// testKits are the packages of internal that only tests import.
var testKits = []string{"internal/testkit"}

// wall is the rule that packages in from import no package in to directly.
type wall struct {
	name     string
	from, to []string
	except   []string // of from
	product  bool     // tests may import it
}

func walls() []wall {
	all := []wall{
		{
			name: "internal imports no service, no agent, no composition", from: []string{"internal"},
			to: slices.Concat([]string{"services", "agent"}, composers),
		},
		{
			name: "the agent imports no service, no composition", from: agents,
			to: slices.Concat([]string{"services"}, composers),
		},
		{name: "services import no agent, no composition", from: services, to: slices.Concat([]string{"agent"}, composers)},
		{
			name: "devstack imports no service, no agent, no composition", from: []string{devstack},
			to: slices.Concat([]string{"services", "agent"}, composers),
		},
		{
			name: "internal imports no devstack, but in tests and their kits", from: []string{"internal"}, except: testKits,
			to: []string{devstack}, product: true,
		},
		{
			name: "services and the agent import no devstack", from: slices.Concat(services, agents),
			to: []string{devstack}, product: true,
		},
		{
			name: "services and the agent make no roles and no tables", from: slices.Concat(services, agents),
			to: []string{"internal/pg/schema"}, product: true,
		},
	}
	all = append(all, rooms()...)
	all = append(all, runtimeRooms()...)
	all = append(all, clientRooms()...)
	all = append(all, sagaRooms()...)
	all = append(all, rpcRooms()...)
	all = append(all, sessionRooms()...)
	all = append(all, gatewayRooms()...)
	all = append(all, readingRooms()...)
	all = append(all, identityRooms()...)
	all = append(all, findingsRooms()...)
	all = append(all, taskRooms()...)
	all = append(all, operationRooms()...)
	all = append(all, drillRooms()...)
	for _, s := range services {
		others := slices.DeleteFunc(slices.Clone(services), func(o string) bool { return o == s })
		all = append(all, wall{name: s + " imports no other service", from: []string{s}, to: others})
	}
	return all
}

// TestRequestsAreDecidedInOnePlace: only the service's root and benches, which stand in for it, use the package that
// decides whether an operation may begin. Tests of other packages may make requests.
func TestRequestsAreDecidedInOnePlace(t *testing.T) {
	const decides = "services/lifecycle/operation"
	for _, p := range load(t).pkgs {
		if p.dir == "services/lifecycle" || p.dir == decides || underAny(p.dir, []string{"bench"}) {
			continue
		}
		for _, f := range p.files {
			for _, imported := range f.imports {
				if !f.test && dirOf(imported) == decides {
					t.Errorf("%s imports %s", f.path, decides)
				}
			}
		}
	}
}

func TestImportWalls(t *testing.T) {
	tr := load(t)
	for _, w := range walls() {
		t.Run(w.name, func(t *testing.T) {
			for _, dir := range slices.Concat(w.from, w.to, w.except) {
				if !tr.has(dir) {
					t.Errorf("the wall names %s, which has no package", dir)
				}
			}
			for _, p := range tr.pkgs {
				if !underAny(p.dir, w.from) || underAny(p.dir, w.except) {
					continue
				}
				for _, f := range p.files {
					for _, imported := range f.imports {
						dir := dirOf(imported)
						if dir == "" || dir == p.dir || underAny(dir, w.from) {
							continue
						}
						if underAny(dir, w.to) && !(w.product && f.test) {
							t.Errorf("%s imports %s", f.path, dir)
						}
					}
				}
			}
		})
	}
}

// has reports whether a directory, or one below it, has a package. Generated packages are not parsed.
func (tr *tree) has(dir string) bool {
	if under(dir, "gen") {
		found, err := filepath.Glob(filepath.Join(tr.root, filepath.FromSlash(dir), "*.go"))
		return err == nil && len(found) > 0
	}
	for d := range tr.pkgs {
		if under(d, dir) {
			return true
		}
	}
	return false
}

// heavy modules that a program on a customer's machine must not carry: they
// are large, and their presence would mean that the agent can do what only the
// control plane may.
var heavy = []string{
	"github.com/smallstep/certificates",
	"github.com/jackc/pgx",
	"github.com/redis/go-redis",
	"github.com/pressly/goose",
	"github.com/riverqueue/river",
}

// TestAgentLinksNothingHeavy follows imports through this module, so that a
// light package which starts to import a heavy one is found, with its path.
func TestAgentLinksNothingHeavy(t *testing.T) {
	tr := load(t)
	for dir := range tr.pkgs {
		if !underAny(dir, agents) {
			continue
		}
		t.Run(dir, func(t *testing.T) {
			for _, way := range tr.reach(dir) {
				imported := way[len(way)-1]
				for _, h := range heavy {
					if strings.HasPrefix(imported, h+"/") || imported == h {
						t.Errorf("links %s by %s", h, strings.Join(way, " -> "))
					}
				}
				if d := dirOf(imported); underAny(d, []string{"services"}) {
					t.Errorf("links a service by %s", strings.Join(way, " -> "))
				}
			}
		})
	}
}

// migrators are the modules and packages that apply migrations, which no service does.
var migrators = []string{
	"github.com/pressly/goose", "github.com/riverqueue/river/rivermigrate", module + "/internal/pg/schema",
}

// TestServicesLinkNoMigrator follows imports through this module from each service.
func TestServicesLinkNoMigrator(t *testing.T) {
	tr := load(t)
	for _, dir := range services {
		for _, way := range tr.reach(dir) {
			if underAny(way[len(way)-1], migrators) {
				t.Errorf("%s links what applies migrations by %s", dir, strings.Join(way, " -> "))
			}
		}
	}
}

// TestServicesAndAgentLinkNoDevstack follows imports through this module, so that a service that comes to link devstack
// by way of a test kit is found as well.
func TestServicesAndAgentLinkNoDevstack(t *testing.T) {
	tr := load(t)
	for _, dir := range slices.Concat(services, agents) {
		t.Run(dir, func(t *testing.T) {
			for _, way := range tr.reach(dir) {
				if under(dirOf(way[len(way)-1]), devstack) {
					t.Errorf("links devstack by %s", strings.Join(way, " -> "))
				}
			}
		})
	}
}

// reach returns, for each import that a package of the module reaches in a
// normal build, one way to it. It does not look inside other modules.
func (tr *tree) reach(start string) [][]string {
	ways := map[string][]string{}
	queue := []string{start}
	seen := map[string][]string{start: {start}}
	for len(queue) > 0 {
		dir := queue[0]
		queue = queue[1:]
		p := tr.pkgs[dir]
		if p == nil {
			continue // generated
		}
		for _, f := range p.files {
			if f.test || !f.inBuild {
				continue
			}
			for _, imported := range f.imports {
				if _, ok := ways[imported]; ok {
					continue
				}
				ways[imported] = slices.Concat(seen[dir], []string{imported})
				if next := dirOf(imported); next != "" && seen[next] == nil {
					seen[next] = slices.Concat(seen[dir], []string{next})
					queue = append(queue, next)
				}
			}
		}
	}
	keys := slices.Sorted(maps.Keys(ways))
	out := make([][]string, 0, len(keys))
	for _, k := range keys {
		out = append(out, ways[k])
	}
	return out
}

// TestReachFindsTheWay proves the walk itself on a small module.
func TestReachFindsTheWay(t *testing.T) {
	tr := &tree{pkgs: map[string]*pkg{
		"agent": {dir: "agent", files: []*file{{inBuild: true, imports: []string{module + "/internal/pki"}}}},
		"internal/pki": {
			dir: "internal/pki", files: []*file{
				{inBuild: true, imports: []string{"crypto/tls", module + "/internal/ca"}}, {
					test: true, inBuild: true, imports: []string{"testing"},
				},
			},
		},
		"internal/ca": {
			dir: "internal/ca", files: []*file{
				{inBuild: true, imports: []string{"example.org/heavy"}}, {inBuild: false, imports: []string{"example.org/unbuilt"}},
			},
		},
		"internal/else": {dir: "internal/else", files: []*file{{inBuild: true, imports: []string{"example.org/else"}}}},
	}}
	got := tr.reach("agent")
	want := [][]string{
		{"agent", "internal/pki", "crypto/tls"},
		{"agent", "internal/pki", "internal/ca", "example.org/heavy"},
		{"agent", "internal/pki", module + "/internal/ca"},
		{"agent", module + "/internal/pki"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("ways differ (-want +got):\n%s", diff)
	}
}
