package agents

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/mesh/person"
)

// Absent is an agent that connects only after a person has decided something.
type Absent struct {
	Name string
	Why  string // such as "is fenced"
	Next string // what a person does about it
}

// Enrol obtains a token, as any operator would, if the agent has no identity yet. It returns why the agent cannot
// connect, if a decision about its node stands in the way: nil otherwise.
func (a *Agent) Enrol(ctx context.Context, client *person.Client) (*Absent, error) {
	if a.Enrolled() {
		return a.barred(ctx, client)
	}
	identity, err := identityOf(ctx, client, a.Name())
	if err != nil {
		return nil, err
	}
	if identity.GetState() == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD {
		return &Absent{ // a token would end the hold, which a person has to decide
			Name: a.Name(), Why: "has lost its identity, and its node is held",
			Next: fmt.Sprintf("`gpuaas nodes get %s` shows why; after `gpuaas nodes retire %[1]s --reason TEXT` the next start "+
				"enrols it as a new node", a.Name()),
		}, nil
	}
	pending := identity.GetState() == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_PENDING ||
		identity.GetState() == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE && identity.GetCurrentSerial() == ""
	if pending && !a.NeedsToken() {
		return nil, nil
	}
	resp, err := client.Command.EnrollNode(ctx, &readmodelv1.EnrollNodeRequest{Name: a.Name()})
	if fault.Has(err, commonv1.Reason_REASON_ALREADY_EXISTS) {
		return &Absent{
			Name: a.Name(), Why: "has lost its identity",
			Next: fmt.Sprintf("`gpuaas nodes retire %s --reason TEXT`; the next start enrols it as a new node", a.Name()),
		}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("obtain a token for node %s: %w", a.Name(), err)
	}
	return nil, a.Furnish(resp.GetToken())
}

// barred returns why an agent that has enrolled may have no session.
func (a *Agent) barred(ctx context.Context, client *person.Client) (*Absent, error) {
	var held struct {
		NodeID string `json:"node_id"`
	}
	data, err := pki.ReadFile(a.nodeFile())
	if err != nil {
		return nil, fmt.Errorf("read which node agent %s is: %w", a.Name(), err)
	}
	_ = json.Unmarshal(data, &held) // the agent's log has what is wrong with a file that has no id
	if held.NodeID == "" {
		return nil, nil
	}
	identity, err := identityOf(ctx, client, held.NodeID)
	if err != nil {
		return nil, err
	}
	absent := &Absent{Name: a.Name(), Why: "is " + names.Of(identity.GetState())}
	switch identity.GetState() {
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD,
		commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED,
		commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED:
		absent.Next = fmt.Sprintf("`gpuaas nodes get %s` shows why", a.Name())
		return absent, nil
	case commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED:
		absent.Next = fmt.Sprintf("remove %s; the next start enrols it as a new node", a.cfg.Dir)
		return absent, nil
	default:
		return nil, nil
	}
}

// identityOf returns the identity of a node by its id or name; nil if there is none.
func identityOf(ctx context.Context, client *person.Client, node string) (*recoveryv1.NodeIdentity, error) {
	resp, err := client.Query.GetNode(ctx, &readmodelv1.GetNodeRequest{Node: node})
	if fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read node %s: %w", node, err)
	}
	return resp.GetNode().GetIdentity(), nil
}

func (a *Agent) nodeFile() string { return filepath.Join(a.state(), "node.json") }
