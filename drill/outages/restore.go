package outages

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/restored"
	"github.com/gpuaas/mesh/drill/kit/stage"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/mesh/agents"
)

// RestoreReusesNothing is row 35: a database that is older than the agents, the launch log and the instances.
func RestoreReusesNothing() kit.Drill {
	return kit.Drill{
		Name: "restore-reuses-nothing", Slow: true,
		Injects: "one workspace is recreated, one decommissioned and one created; then all services are stopped and the " +
			"database's directory is replaced by a copy " +
			"from before that, and everything is started again: undeclared, and once more declared by `gpuaas migrate restored`",
		Sees: "rollback mode with the launch log as evidence, one incident; every command is refused; running workloads " +
			"serve their users",
		Recovers: "`rollback accept`; then recreations draw epochs that were never used, superseded instances are ended, " +
			"and the one whose workspace is not " +
			"known is ended by an operator",
		Needs: "its own mesh: Postgres and process placement on this host, and the balancer before the node API",
		Expect: kit.Verdict{
			Reason: "control_plane_rollback", UserState: "normal", Owner: "control plane",
			Next: "gpuaas rollback accept",
		},
		Mutation: "the launch log is put back to the copy of the same moment, and no agent comes through to the node API: " +
			"neither shows a number that the database " +
			"does not have; the database is as old as before",
		FailsAt: stage.Detected,
		Run:     runRestored,
	}
}

// lost are the workspaces of which the database forgets something.
type lost struct {
	recreated, gone, made string           // ids
	epochs                map[string]int64 // the highest epoch that each has had
}

// beforeBackup makes the workspaces that exist when the backup is taken.
func beforeBackup(ctx context.Context, r *kit.Run) (*lost, error) {
	l := &lost{epochs: map[string]int64{}}
	for _, id := range []*string{&l.recreated, &l.gone} {
		op, err := r.Mesh.Create(ctx, mesh.FreshName("restore"), nil)
		if err != nil {
			return nil, err
		}
		*id = op.GetWorkspaceId()
		r.About(*id)
		if err := r.Mesh.AwaitState(ctx, *id, commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, await.Limit); err != nil {
			return nil, err
		}
	}
	return l, nil
}

// afterBackup makes the changes that the database is to lose.
func afterBackup(ctx context.Context, r *kit.Run, l *lost) error {
	m := r.Mesh
	if _, err := m.Operate(ctx, l.recreated, commonv1.OperationKind_OPERATION_KIND_RECREATE); err != nil {
		return err
	}
	if _, err := m.Operate(ctx, l.gone, commonv1.OperationKind_OPERATION_KIND_DECOMMISSION); err != nil {
		return err
	}
	op, err := m.Create(ctx, mesh.FreshName("restore"), nil)
	if err != nil {
		return err
	}
	l.made = op.GetWorkspaceId()
	r.About(l.made)
	for id, state := range map[string]commonv1.WorkspaceState{
		l.recreated: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
		l.gone:      commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED,
		l.made:      commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
	} {
		if err := m.AwaitState(ctx, id, state, await.Limit); err != nil {
			return err
		}
	}
	ledger, err := m.Launches()
	if err != nil {
		return err
	}
	for _, line := range ledger {
		l.epochs[line.WorkspaceID] = max(l.epochs[line.WorkspaceID], line.Epoch)
	}
	return nil
}

func runRestored(ctx context.Context, r *kit.Run) error {
	m := r.Mesh
	c, err := m.Cluster()
	if err != nil {
		return err
	}
	l, err := beforeBackup(ctx, r)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	defer func() {
		for _, id := range []string{l.recreated, l.gone} {
			r.Leave(ctx, id)
		}
	}()
	b, err := restored.Take(ctx, m, c)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	if err := afterBackup(ctx, r, l); err != nil {
		return stage.At(stage.Good, err)
	}
	closed, err := restored.Incidents(ctx, m)
	if err != nil {
		return stage.At(stage.Good, err)
	}
	between := func(context.Context) error { return nil }
	if r.Control == kit.Mutated {
		between = func(context.Context) error { return b.HideNewer(c) }
		defer func() { _ = b.ShowNewer(ctx, m, c) }() // the drill has failed by then, as it had to
	}
	err = r.Inject(ctx, "the database is put back to a copy from before a recreation, a decommission and a create",
		func(ctx context.Context) error { return b.PutBack(ctx, c, between) },
		func(context.Context) error { return b.InPlace(c) })
	if err != nil {
		return err
	}
	r.FaultAt = time.Now() // the budget counts from the control plane's return: before that the API cannot report anything
	err = r.Detect(ctx, func(ctx context.Context) (kit.Verdict, error) { return rolledBack(ctx, m, l, len(closed)) })
	if err != nil {
		return err
	}
	if r.Control != kit.Mutated {
		if n, err := agents.Await(ctx, m.Client, c.Nodes, await.Limit); err != nil || n < len(c.Nodes) {
			return stage.At(stage.Verdict, errors.Join(err, fmt.Errorf("%d of %d machines are connected", n, len(c.Nodes))))
		}
		// Its agent lost its session with the services, restore or not: the state that its user sees counts once the agent is
		// back.
		err := await.Until(ctx, "the bystander's agent", await.Limit, func(ctx context.Context) error {
			w, err := m.Workspace(ctx, mesh.Tenant+"/"+mesh.Bystander)
			if err == nil && !w.GetAgentConnected() {
				err = errors.New("it is not connected")
			}
			r.Verdict.UserState = names.Of(w.GetUserState())
			return err
		})
		if r.Result.UserState = r.Verdict.UserState; err != nil {
			return stage.At(stage.Verdict, err)
		}
	}
	if err := r.Check(ctx); err != nil {
		return err
	}
	if err := standsStill(ctx, r, l); err != nil {
		return stage.At(stage.Verdict, err)
	}
	if err := restored.Accept(ctx, m); err != nil {
		return stage.At(stage.Recover, err)
	}
	if err := convergesAgain(ctx, r, l, len(closed)); err != nil {
		return err
	}
	if err := declaredRestore(ctx, r, l); err != nil {
		return stage.At(stage.Evidence, err)
	}
	return errors.Join(r.Retire(ctx, l.recreated), r.Retire(ctx, l.gone))
}

// rolledBack returns the verdict: the mode, with the launch log as its evidence, and one incident.
func rolledBack(ctx context.Context, m *mesh.Mesh, l *lost, before int) (kit.Verdict, error) {
	answer, err := m.Client.Rollback.GetRollback(ctx, &readmodelv1.GetRollbackRequest{})
	if err != nil {
		return kit.Verdict{}, err
	}
	mode := answer.GetRollback()
	if !mode.GetActive() {
		return kit.Verdict{}, errors.New("rollback mode is not set")
	}
	if !slices.ContainsFunc(mode.GetEvidence(), func(e *recoveryv1.RollbackEvidence) bool {
		return e.GetKind() == recoveryv1.RollbackEvidenceKind_ROLLBACK_EVIDENCE_KIND_LAUNCH_LOG_AHEAD &&
			e.GetSubject() == l.recreated
	}) {
		return kit.Verdict{}, fmt.Errorf("of %d pieces of evidence none is the launch log's about the workspace that was "+
			"recreated", mode.GetEvidenceTotal())
	}
	incidents, err := restored.Incidents(ctx, m)
	if err != nil {
		return kit.Verdict{}, err
	}
	if n := len(incidents) - before; n != 1 || incidents[0].GetClosedAt() != nil ||
		incidents[0].GetSeverity() != commonv1.Severity_SEVERITY_P0 {
		return kit.Verdict{}, fmt.Errorf("%d incidents came of it", n)
	}
	w, err := m.Workspace(ctx, mesh.Tenant+"/"+mesh.Bystander)
	if err != nil {
		return kit.Verdict{}, err
	}
	return kit.Verdict{
		Reason: names.Of(commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK), UserState: names.Of(w.GetUserState()),
		Next: incidents[0].GetNextAction(),
	}, nil
}

// standsStill checks that commands are refused, and that the launch log gets no line about a launch or an end, however
// often the sweeps run.
func standsStill(ctx context.Context, r *kit.Run, l *lost) error {
	m := r.Mesh
	before, err := decisions(m)
	if err != nil {
		return err
	}
	_, err = m.Create(ctx, mesh.FreshName("restore"), nil)
	if !fault.Has(err, commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK) {
		return fmt.Errorf("a create is answered %w", cmp.Or(err, errors.New("as if nothing were wrong")))
	}
	_, err = m.Operate(ctx, l.recreated, commonv1.OperationKind_OPERATION_KIND_RECREATE)
	if !fault.Has(err, commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK) {
		return fmt.Errorf("a recreation is answered %w", cmp.Or(err, errors.New("as if nothing were wrong")))
	}
	const sweeps = 10 * time.Second
	if err := await.Sleep(ctx, sweeps); err != nil {
		return err
	}
	after, err := decisions(m)
	if err == nil && after != before {
		err = fmt.Errorf("%d launches and ends came in the mode", after-before)
	}
	for _, id := range []string{l.recreated, l.made} {
		err = errors.Join(err, m.OneLife(id, l.epochs[id]))
	}
	if err == nil {
		r.Note("for %s nothing was launched and nothing ended; what ran went on", sweeps)
	}
	return err
}

// decisions returns the number of lines of the launch log that are about a launch or an end.
func decisions(m *mesh.Mesh) (int, error) {
	ledger, err := m.Launches()
	return len(slices.DeleteFunc(ledger, func(l host.Launch) bool { return l.Op == "restarted" })), err
}

// convergesAgain recreates the workspaces that the database lists, ends the instance that no row accounts for, and
// checks that no number was used twice.
func convergesAgain(ctx context.Context, r *kit.Run, l *lost, before int) error {
	m := r.Mesh
	asked := map[string]bool{}
	err := r.Recovered(ctx, "every workspace serves in an epoch that was never used, and nothing runs that none "+
		"accounts for", func(ctx context.Context) error {
		for _, id := range []string{l.recreated, l.gone} {
			w, err := m.Workspace(ctx, id)
			if err != nil {
				return err
			}
			if w.GetEpoch() <= l.epochs[id] && !asked[id] {
				if _, err := m.Operate(ctx, id, commonv1.OperationKind_OPERATION_KIND_RECREATE); err != nil {
					return err
				}
				asked[id] = true
			}
			if w.GetEpoch() <= l.epochs[id] {
				return fmt.Errorf("workspace %s is in epoch %d, and %d was used before", id, w.GetEpoch(), l.epochs[id])
			}
			if err := m.Serving(ctx, id, w.GetEpoch()); err != nil {
				return err
			}
		}
		return endLost(ctx, m, l.made)
	})
	if err != nil {
		return err
	}
	if err := neverTwice(m, l); err != nil {
		return stage.At(stage.Evidence, err)
	}
	incidents, err := restored.Incidents(ctx, m)
	if err == nil && (len(incidents)-before != 1 || incidents[0].GetClosedAt() == nil) {
		err = fmt.Errorf("%d incidents came of it, or the one is not over", len(incidents)-before)
	}
	if err == nil {
		r.Evidence(incidents[0].GetIncidentId())
	}
	return stage.At(stage.Evidence, err)
}

// endLost ends the instance of a workspace that the database has forgotten, as the list of instances names it, by an
// operator's verb.
func endLost(ctx context.Context, m *mesh.Mesh, workspaceID string) error {
	resp, err := m.Client.Query.ListInstances(ctx, &readmodelv1.ListInstancesRequest{WorkspaceId: workspaceID})
	if err != nil {
		return err
	}
	if len(resp.GetItems()) != 1 || !resp.GetItems()[0].GetUnaccounted() {
		return fmt.Errorf("the list of instances shows %d of the workspace that is not known", len(resp.GetItems()))
	}
	i := resp.GetItems()[0]
	if i.GetState() != commonv1.InstanceState_INSTANCE_STATE_ENDED {
		_, err := m.Client.Instances.EndInstance(ctx, &readmodelv1.EndInstanceRequest{
			Request: &lifecyclev1.EndInstanceRequest{Instance: i.GetInstanceId(), Reason: "drill"},
		})
		return cmp.Or(err, errors.New("its end is not shown yet"))
	}
	return m.OneLife(workspaceID, 0)
}

// neverTwice checks that no epoch was launched twice, and none after a higher one.
func neverTwice(m *mesh.Mesh, l *lost) error {
	ledger, err := m.Launches()
	if err != nil {
		return err
	}
	for _, id := range []string{l.recreated, l.gone, l.made} {
		_, _, wrong := host.CheckLaunches(ledger, id)
		err = errors.Join(err, wrong, host.CheckRising(ledger, id))
	}
	return err
}

// declaredRestore restores once more, and declares it before any service is started: the era is raised, and the
// evidence of earlier eras that agents and the launch log keep makes no second incident, not even after it was
// accepted.
func declaredRestore(ctx context.Context, r *kit.Run, l *lost) error {
	m := r.Mesh
	c, err := m.Cluster()
	if err != nil {
		return err
	}
	b, err := restored.Take(ctx, m, c)
	if err != nil {
		return err
	}
	if _, err := m.Operate(ctx, l.recreated, commonv1.OperationKind_OPERATION_KIND_RECREATE); err != nil {
		return err
	}
	if err := m.AwaitState(ctx, l.recreated, commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, await.Limit); err != nil {
		return err
	}
	w, err := m.Workspace(ctx, l.recreated)
	if err != nil {
		return err
	}
	incidents, err := restored.Incidents(ctx, m)
	if err != nil {
		return err
	}
	if err := b.PutBack(ctx, c, func(ctx context.Context) error { return restored.Declare(ctx, c) }); err != nil {
		return err
	}
	mode, err := restored.AwaitMode(ctx, m)
	if err != nil || !mode.GetDeclared() {
		return cmp.Or(err, errors.New("the mode is set, and not as declared"))
	}
	if err := restored.Accept(ctx, m); err != nil {
		return err
	}
	if _, err := m.Operate(ctx, l.recreated, commonv1.OperationKind_OPERATION_KIND_RECREATE); err != nil {
		return err
	}
	err = await.Until(ctx, "the workspace to serve in a higher epoch", await.Limit, func(ctx context.Context) error {
		now, err := m.Workspace(ctx, l.recreated)
		if err != nil {
			return err
		}
		if now.GetEpoch() <= w.GetEpoch() {
			return fmt.Errorf("it is in epoch %d, and %d was used before", now.GetEpoch(), w.GetEpoch())
		}
		return m.Serving(ctx, l.recreated, now.GetEpoch())
	})
	if err != nil {
		return err
	}
	after, err := restored.Incidents(ctx, m)
	if err == nil && len(after)-len(incidents) != 1 {
		err = fmt.Errorf("%d incidents came of a declared restore", len(after)-len(incidents))
	}
	if err == nil {
		r.Note("declared: one incident, the next epoch above that of the lost history")
	}
	return errors.Join(err, neverTwice(m, l))
}
