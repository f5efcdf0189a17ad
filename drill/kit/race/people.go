package race

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/mesh/person"
)

// The requesters, beside the watchdog.
const (
	userName  = "drill-user"
	adminName = "drill-admin"
)

// Invite admits the workspace's user and an admin, each with a session of their own; in a mesh of another operator all
// requests are of the person who runs the drill. They are different people in each turn: the audit log counts repeated
// actions of one person in one entry.
func (x *Race) Invite(ctx context.Context) error {
	m := x.r.Mesh
	x.Dismiss()
	x.askers = []*person.Client{m.Client}
	if !m.Own() {
		return nil
	}
	c, err := m.Cluster()
	if err != nil {
		return err
	}
	ws, err := m.Workspace(ctx, x.id)
	if err != nil {
		return err
	}
	user, err := c.Person(ctx, ws.GetTenantId(),
		person.Session{Subject: x.called(userName), Roles: []string{"tenant"}, Life: time.Hour})
	if err != nil {
		return fmt.Errorf("let the user in: %w", err)
	}
	admin, err := c.Person(ctx, "",
		person.Session{Subject: x.called(adminName), Roles: []string{"operator"}, Life: time.Hour})
	if err != nil {
		user.Close()
		return fmt.Errorf("let the admin in: %w", err)
	}
	x.askers = []*person.Client{user, admin}
	return nil
}

// called returns a person's name in this turn.
func (x *Race) called(who string) string { return fmt.Sprintf("%s-%d", who, x.turns) }

// Dismiss ends the sessions of the people whom Invite admitted.
func (x *Race) Dismiss() {
	for _, c := range x.askers {
		if c != x.r.Mesh.Client {
			c.Close()
		}
	}
}

// requesters returns the people who requested an operation, whether they began it or joined, from the audit log.
func (x *Race) requesters(ctx context.Context, operationID string) ([]string, error) {
	resp, err := x.r.Mesh.Client.Audit.ListAudit(ctx,
		&readmodelv1.ListAuditRequest{PageSize: 500, Workspace: x.id, Action: "workspace.recreate"})
	if err != nil {
		return nil, err
	}
	var by []string
	for _, row := range resp.GetItems() {
		e := row.GetEntry()
		if e.GetWorkflowId() != operationID {
			continue
		}
		if who := e.GetActor(); !strings.HasPrefix(who, "service/") && !slices.Contains(by, who) {
			by = append(by, who)
		}
	}
	slices.Sort(by)
	return by, nil
}
