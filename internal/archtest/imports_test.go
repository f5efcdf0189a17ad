package archtest

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var services = []string{"services/nodeapi", "services/lifecycle", "services/recovery", "services/readmodel"}

// composers see several services at once, and nothing imports them but each
// other.
var composers = []string{"mesh", "drill", "bench", "chaos", "cmd"}

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
	}
	all = append(all, rooms()...)
	all = append(all, runtimeRooms()...)
	all = append(all, clientRooms()...)
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

// rooms are the walls between the packages of lifecycle, each of which decides one thing.
func rooms() []wall {
	const l = "services/lifecycle/"
	steps := []string{l + "provision", l + "reap", l + "schema", l + "task"}
	return []wall{
		{
			name: "what a workspace holds knows no step and nothing that is reaped",
			from: []string{l + "allocation", l + "spec"}, to: steps,
		},
		{name: "steps know nothing of reaping", from: []string{l + "provision"}, to: []string{l + "reap"}},
		{name: "reaping knows no step", from: []string{l + "reap"}, to: []string{l + "provision"}},
		{
			name: "the saga core knows no workspace", from: []string{l + "saga"},
			to: slices.Concat(steps, []string{l + "allocation", l + "spec", l + "placement"}),
		},
		{
			name: "the ledger of claims knows nobody who writes in it", from: []string{l + "claims"},
			to: slices.Concat(steps, []string{l + "allocation", l + "spec", l + "placement", l + "saga", l + "gate"}),
		},
	}
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

// runtimeRooms are the walls between the packages of the agent's runtime: process supervises, and knows the others.
func runtimeRooms() []wall {
	const r = "agent/runtime/"
	return []wall{
		{
			name: "isolation knows no output and no supervision", from: []string{r + "isolation"},
			to: []string{r + "jsonfile", r + "output", r + "process"},
		},
		{
			name: "output knows no isolation and no supervision", from: []string{r + "output"},
			to: []string{r + "isolation", r + "process", r + "procfs"},
		},
		{
			name: "identities of processes and files know no workload", from: []string{r + "jsonfile", r + "procfs"},
			to: []string{r + "isolation", r + "output", r + "process", r + "uid"},
		},
	}
}

// gatewayRooms are the walls between the packages of readmodel's gateway: queries see the others, and the others see what
// a caller may read alone.
func gatewayRooms() []wall {
	const g = "services/readmodel/gateway"
	return []wall{
		{
			name: "what a caller may read knows no server", from: []string{g + "/caller"},
			to: []string{g + "/forward", g + "/people", g + "/status"}, product: true,
		},
		{
			name: "people know no command and no status", from: []string{g + "/people"},
			to: []string{g + "/forward", g + "/status"}, product: true,
		},
		{
			name: "commands know no session and no status", from: []string{g + "/forward"},
			to: []string{g + "/people", g + "/status"}, product: true,
		},
		{
			name: "the status knows no owner and no session", from: []string{g + "/status"},
			to: []string{g + "/forward", g + "/people"}, product: true,
		},
	}
}

// clientRooms are the walls between the packages of the command line's client. Commands are cut by their noun; a noun
// may use the records and the operations, and no other.
func clientRooms() []wall {
	const c = "cmd/gpuaas/client/"
	nouns := []string{
		c + "controlplane", c + "inventory", c + "nodes", c + "operations", c + "people", c + "records", c + "workspaces",
	}
	all := []wall{
		{
			name: "what each command of the client uses knows no command",
			from: []string{c + "human", c + "exit", c + "output", c + "kit"}, to: nouns, product: true,
		},
		{
			name: "the client's output knows no session", from: []string{c + "human", c + "exit", c + "output"},
			to: []string{c + "kit", c + "contexts"}, product: true,
		},
	}
	for _, noun := range nouns {
		others := slices.DeleteFunc(slices.Clone(nouns),
			func(o string) bool { return o == noun || o == c+"records" || o == c+"operations" })
		all = append(all, wall{name: noun + " uses no other noun but records and operations", from: []string{noun},
			to: others})
	}
	return all
}

// rpcRooms are the walls between the packages of rpc: the port knows the guard and what the guard needs, and the client's
// side knows neither.
func rpcRooms() []wall {
	const r = "internal/rpc/"
	return []wall{
		{
			name: "what a message may hold knows no caller", from: []string{r + "codec", r + "descriptors"},
			to: []string{r + "assertion", r + "calls", r + "guard", r + "port"},
		},
		{
			name: "an assertion knows no method that needs it", from: []string{r + "assertion"},
			to: []string{r + "calls", r + "codec", r + "guard", r + "port"}, product: true,
		},
		{
			name: "the side that calls knows nothing of the side that serves", from: []string{r + "calls"},
			to: []string{r + "codec", r + "guard", r + "port"}, product: true,
		},
		{
			name: "the guard knows no port", from: []string{r + "guard"}, to: []string{r + "calls", r + "port"},
		},
		{name: "a port makes no calls", from: []string{r + "port"}, to: []string{r + "calls"}, product: true},
	}
}

// sessionRooms are the walls between the packages of the agent's session, which alone knows the others.
func sessionRooms() []wall {
	const s = "agent/session/"
	return []wall{
		{
			name: "the queue of frames knows no connection", from: []string{s + "outbox"},
			to: []string{s + "transport", s + "memory", "agent/identity"},
		},
		{
			name: "the connection knows no frame that waits and no identity", from: []string{s + "transport"},
			to: []string{s + "outbox", s + "memory", "agent/identity", "gen/gpuaas/node/v1"},
		},
	}
}

// drillRooms are the walls between the packages of drills. What the host shows proves that a fault took effect, so it is
// read without code of the programs that the fault is injected into.
func drillRooms() []wall {
	const k = "drill/kit"
	return []wall{
		{name: "what drills are made of knows no drill", from: []string{k}, to: []string{"drill"}},
		{
			name: "stages, waits, the host and the mesh of drills know no run",
			from: []string{k + "/stage", k + "/await", k + "/host", k + "/mesh"}, to: []string{k},
		},
		{
			name: "drills read the host without what runs there", from: []string{k + "/stage", k + "/await", k + "/host"},
			to: slices.Concat([]string{k, "mesh", "agent"}, services),
		},
	}
}

// readingRooms are the walls between the packages of readmodel that read for people: view reads, and knows the others.
func readingRooms() []wall {
	const r = "services/readmodel/"
	readers := []string{r + "view", r + "watch", r + "gateway", r + "escalation"}
	return []wall{
		{
			name: "the status of an object knows neither lists nor references", from: []string{r + "status"},
			to: append([]string{r + "list", r + "lookup"}, readers...), product: true,
		},
		{
			name: "lists know no list", from: []string{r + "list"},
			to: append([]string{r + "lookup", r + "project", r + "status"}, readers...), product: true,
		},
		{
			name: "references know no status and no reader", from: []string{r + "lookup"},
			to: append([]string{r + "status"}, readers...), product: true,
		},
	}
}

// identityRooms are the walls around the package that decides about nodes.
func identityRooms() []wall {
	const r = "services/recovery/"
	return []wall{{
		name: "identities know neither who enrols nor how lifecycle is told", from: []string{r + "identity"},
		to: []string{r + "authority", r + "enrol", r + "fences"}, product: true,
	}}
}

func TestImportWalls(t *testing.T) {
	tr := load(t)
	for _, w := range walls() {
		t.Run(w.name, func(t *testing.T) {
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
		"agent":         {dir: "agent", files: []*file{{inBuild: true, imports: []string{module + "/internal/pki"}}}},
		"internal/pki":  {dir: "internal/pki", files: []*file{{inBuild: true, imports: []string{"crypto/tls", module + "/internal/ca"}}, {test: true, inBuild: true, imports: []string{"testing"}}}},
		"internal/ca":   {dir: "internal/ca", files: []*file{{inBuild: true, imports: []string{"example.org/heavy"}}, {inBuild: false, imports: []string{"example.org/unbuilt"}}}},
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

func findingsRooms() []wall {
	const f = "services/lifecycle/findings/"
	return []wall{
		{
			name: "how findings are kept and tables are read knows no detector", from: []string{f + "finding", f + "scan"},
			to: []string{f + "detect", f + "guard"}, product: true,
		},
		{name: "reading tables in pages knows no finding", from: []string{f + "scan"}, to: []string{f + "finding"}},
		{name: "detectors do not use the drift guard", from: []string{f + "detect"}, to: []string{f + "guard"}},
		{name: "the drift guard uses no other detector", from: []string{f + "guard"}, to: []string{f + "detect"}},
	}
}

func taskRooms() []wall {
	const t = "services/lifecycle/task/"
	return []wall{
		{name: "reports of tasks offer none", from: []string{t + "report"}, to: []string{t + "dispatch"}, product: true},
	}
}

// operationRooms are the walls around what decides whether an operation may begin: what it asks does not know it.
func operationRooms() []wall {
	const l = "services/lifecycle/"
	above := []string{l + "operation", l + "provision", l + "reap", l + "schema", l + "task"}
	return []wall{
		{
			name: "tenants know no operation and nothing that one makes", from: []string{l + "tenants"},
			to: slices.Concat(above, []string{l + "allocation", l + "outputs", l + "readiness", l + "spec"}),
		},
		{
			name: "whether workloads are ready is decided from reports alone", from: []string{l + "readiness"},
			to: slices.Concat(above, []string{l + "allocation", l + "gate", l + "claims", "internal/pg"}),
		},
		{name: "reading output begins no operation", from: []string{l + "outputs"}, to: above},
	}
}
