package mesh

import (
	"context"
	"errors"
	"os/exec"

	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/stage"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/mesh/cluster"
	"github.com/gpuaas/mesh/mesh/person"
)

// Tenant of everything that drills make.
const Tenant = "drill"

// Mesh is the mesh on which drills run.
type Mesh struct {
	Client *person.Client
	// Scaled reports whether the mesh runs with the short policy values of Scaled(): its drills are judged by scaled
	// budgets.
	Scaled bool

	cluster *cluster.Cluster // nil: a mesh of another operator, of which only the API is known
	stop    func(context.Context) error
}

// Config of a mesh of the drills' own.
type Config struct {
	Programs   string // directory of gpuaas and gpuaas-node-agent
	CacheDir   string // searched for Postgres' binaries after the system's
	Dir        string // empty: a temporary one, which is removed unless Keep
	Production bool   // production timers instead of the scaled ones
	LogLevel   string
	// Reaper is a process that outlives this one and calls Reap(dir) as soon as its standard input ends, for any reason;
	// nil: no process does.
	Reaper func(dir string) *exec.Cmd
}

// On returns a mesh that another operator runs, with its policy as it is. Only faults that the API can cause can be
// injected there.
func On(client *person.Client) *Mesh { return &Mesh{Client: client} }

// Own reports whether the mesh is the drills' own, whose hosts and processes they may damage.
func (m *Mesh) Own() bool { return m.cluster != nil }

// Close ends a mesh of the drills' own with everything that runs on it, and removes its files; of another mesh it only
// closes the connection.
func (m *Mesh) Close(ctx context.Context) error {
	if m.stop == nil {
		return nil
	}
	return m.stop(ctx)
}

// Tails returns the ends of the logs, for people.
func (m *Mesh) Tails(lines int) string {
	if m.cluster == nil {
		return ""
	}
	return m.cluster.Tails(lines)
}

// Form returns whether the drills of the mesh run in scaled or in production form.
func (m *Mesh) Form() string {
	if m.Scaled {
		return "scaled"
	}
	return "production"
}

// Policy returns the policy that the mesh runs with, as the API reports it.
func (m *Mesh) Policy(ctx context.Context) (policy.Set, error) {
	resp, err := await.Answer(ctx, "the question for the policy",
		func(ctx context.Context) (*readmodelv1.GetPolicyResponse, error) {
			return m.Client.Query.GetPolicy(ctx, &readmodelv1.GetPolicyRequest{})
		})
	if err != nil {
		return policy.Set{}, err
	}
	values := map[string]string{}
	for _, k := range resp.GetItems() {
		if _, known := policy.Lookup(k.GetKey()); known {
			values[k.GetKey()] = k.GetValue()
		}
	}
	return policy.NewSet(values)
}

// ErrNotOwn is the refusal of a fault that the drills' own mesh alone takes.
var ErrNotOwn = errors.New("this fault hurts hosts and processes: it is injected into a mesh of the drill's own " +
	"alone; leave --context out")

// Cluster returns the cluster, or an error if the mesh is not the drills' own.
func (m *Mesh) Cluster() (*cluster.Cluster, error) {
	if m.cluster == nil {
		return nil, stage.At(stage.Good, ErrNotOwn)
	}
	return m.cluster, nil
}
