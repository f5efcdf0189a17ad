package outputs

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/tenants"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// relayWithin bounds a read through nodeapi, which waits a little shorter for the agent.
const relayWithin = 8 * time.Second

// Relay is a replica of nodeapi, which reads from the agents whose sessions it has.
type Relay interface {
	ReadOutput(ctx context.Context, req *nodev1.ReadOutputRequest) (*nodev1.ReadOutputResponse, error)
}

// Deps are the dependencies of a Server.
type Deps struct {
	DB *pgxpool.Pool
	// Dial returns the client of a replica of nodeapi at an address.
	Dial func(address string) Relay
}

// Server serves OutputService: it decides who may read a workload's output, and finds the replica that can read it. It
// stores no output.
type Server struct {
	deps Deps

	mu     sync.Mutex
	relays map[string]Relay // by address
}

// NewServer returns a server with the given dependencies.
func NewServer(deps Deps) *Server { return &Server{deps: deps, relays: map[string]Relay{}} }

// ReadOutput returns a piece of a workload's output. A workspace of another tenant is not found.
func (o *Server) ReadOutput(ctx context.Context, req *lifecyclev1.ReadOutputRequest) (*lifecyclev1.ReadOutputResponse,
	error,
) {
	person, ok := rpc.PersonFrom(ctx)
	if !ok || person.TenantID == "" && !person.Operator() {
		return nil, fault.New(commonv1.Reason_REASON_PERMISSION_DENIED,
			"the output of workloads is for people of their tenant and for operators")
	}
	w, err := tenants.Workspace(ctx, o.deps.DB, req.GetWorkspaceId())
	if err != nil {
		return nil, err
	}
	name, err := chosenWorkload(w, req.GetWorkload())
	if err != nil {
		return nil, err
	}
	a, held, err := allocation.Live(ctx, o.deps.DB, w.ID)
	if err != nil {
		return nil, err
	}
	if !held || a.NodeID == "" {
		return nil, fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
			"no instance of the workspace stands: it is "+w.State,
			fault.Unmet("the workspace has no instance"),
			fault.Remedy("the end of what a failed workload wrote is in `gpuaas workspaces timeline`; output can be read "+
				"once the workspace runs"))
	}
	relay, err := o.relayOf(ctx, a.NodeID)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, relayWithin)
	defer cancel()
	res, err := relay.ReadOutput(ctx, &nodev1.ReadOutputRequest{
		NodeId: a.NodeID, WorkspaceId: w.ID, Epoch: a.Epoch, Workload: name, Previous: req.GetPrevious(), From: req.GetFrom(),
		MaxBytes: req.GetMaxBytes(),
	})
	//nolint:exhaustive // the others are the agent's or the replica's own, and are for the person
	switch fault.ReasonOf(err) {
	case commonv1.Reason_REASON_UNSPECIFIED:
	case commonv1.Reason_REASON_PERMISSION_DENIED, commonv1.Reason_REASON_UNAUTHENTICATED, commonv1.Reason_REASON_INTERNAL,
		commonv1.Reason_REASON_UNIMPLEMENTED:
		return nil, fmt.Errorf("ask nodeapi for output: %w", errors.New(err.Error()))
	}
	if err != nil {
		return nil, err
	}
	return &lifecyclev1.ReadOutputResponse{Workload: name, Output: res.GetOutput()}, nil
}

// chosenWorkload returns the workload that is named, or the only one if name is empty.
func chosenWorkload(w workspace.Row, name string) (string, error) {
	spec := &lifecyclev1.WorkspaceSpec{}
	if err := names.UnmarshalInto(w.Spec, spec); err != nil {
		return "", fmt.Errorf("read spec of workspace: %w", err)
	}
	var all []string
	for _, workload := range spec.GetWorkloads() {
		if workload.GetName() == name {
			return name, nil
		}
		all = append(all, workload.GetName())
	}
	switch {
	case name != "":
		return "", fault.New(commonv1.Reason_REASON_NOT_FOUND, fmt.Sprintf("the workspace has no workload %q", name),
			fault.Remedy("its workloads are "+strings.Join(all, ", ")))
	case len(all) == 1:
		return all[0], nil
	}
	return "", fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT,
		fmt.Sprintf("the workspace has %d workloads: %s", len(all), strings.Join(all, ", ")),
		fault.Remedy("name one of them with --workload"))
}

// route is whether a node has a session, and the address of the replica of nodeapi that has it.
type route struct {
	Connected bool   `db:"connected"`
	Address   string `db:"address"`
}

var routeOfNode = pg.Define(pg.RoleLifecycle, "outputs.route_of_node",
	`SELECT `+gate.ConnectedSQL+` AS connected,
			coalesce((SELECT r.address FROM mesh.replica r WHERE r.replica_id = g.replica_id), '') AS address
		FROM lifecycle.node_gate g WHERE g.node_id = $1`)

// relayOf returns the replica of nodeapi that has the node's session.
func (o *Server) relayOf(ctx context.Context, nodeID string) (Relay, error) {
	to, err := pg.One[route](ctx, o.deps.DB, routeOfNode, nodeID)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return nil, fmt.Errorf("find session of node: %w", err)
	}
	if err != nil || !to.Connected {
		return nil, fault.New(commonv1.Reason_REASON_NODE_NOT_CONNECTED, "")
	}
	address := to.Address
	if address == "" {
		return nil, fault.New(commonv1.Reason_REASON_UNAVAILABLE,
			"the replica of nodeapi that has the node's session is of an earlier version",
			fault.Remedy("update nodeapi, then ask again"))
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if r, ok := o.relays[address]; ok {
		return r, nil
	}
	const most = 64 // replicas that start again may have other addresses
	if len(o.relays) >= most {
		clear(o.relays)
	}
	r := o.deps.Dial(address)
	o.relays[address] = r
	return r, nil
}
