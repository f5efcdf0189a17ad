package operation

import (
	"context"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
)

// newest returns the workspace's newest allocation; an id that no allocation has if the workspace never had one.
func (a *scenario) newest() (id string, fence int64) {
	id = ids.New()
	err := a.db.OwnerPool().QueryRow(testkit.Context(a.t),
		`SELECT coalesce(max(x.id), $2), coalesce(max(x.fence), 1) FROM (
		SELECT allocation_id::text AS id, fence FROM lifecycle.allocation WHERE workspace_id = $1
			ORDER BY epoch DESC, created_at DESC LIMIT 1) AS x`,
		a.s.ID, id).Scan(&id, &fence)
	if err != nil {
		a.fail("read allocation: %v", err)
	}
	return id, fence
}

// askRelease requests that a release of the workspace's newest allocation be tried again, or forced.
func (a *scenario) askRelease(ctx context.Context, q request) (*lifecyclev1.Operation, error) {
	allocations := NewAllocations(a.seats[q.seat].server)
	id, fence := a.newest()
	if q.verb == askRetryRelease {
		res, err := allocations.RetryRelease(ctx,
			&lifecyclev1.RetryReleaseRequest{AllocationId: id, Reason: "the model asks", DryRun: q.dry})
		return res.GetOperation(), err
	}
	req := &lifecyclev1.ForceReleaseRequest{
		AllocationId: id, ExpectedFence: fence, FencedProof: commonv1.FencedProof_FENCED_PROOF_REIMAGED,
		Reason: "the model asks", DryRun: q.dry,
	}
	if q.override {
		req.ExpectedFence++
	}
	if !q.noReason {
		req.AckOrphans = a.acks
	}
	res, err := allocations.ForceRelease(ctx, req)
	if q.dry && err == nil {
		a.acks = nil
		for _, c := range res.GetClaims() {
			a.acks = append(a.acks, c.GetClaimId())
		}
	}
	return res.GetOperation(), err
}

// expectsRelease returns the model's verdict on a request about the workspace's newest allocation.
func (a *scenario) expectsRelease(q request) verdict {
	v := a.rules.decide(a.s, q.verb, false)
	switch {
	case q.who == "stranger", a.count(`SELECT count(*) FROM lifecycle.allocation WHERE workspace_id = $1`, a.s.ID) == 0:
		return refusal(commonv1.Reason_REASON_NOT_FOUND)
	case v.how == refuses, q.verb == askRetryRelease:
		return v
	case q.override:
		return refusal(commonv1.Reason_REASON_CONFLICT)
	case q.noReason && !q.dry && len(a.acks) > 0:
		return refusal(commonv1.Reason_REASON_PRECONDITION_FAILED)
	}
	return v
}

// failsToRelease brings the scenario's workspace into a stuck decommission whose release of the allocation has failed.
func (a *scenario) failsToRelease() {
	a.runsOut()
	a.request(request{verb: askDecommission})
	a.mu.Lock()
	a.faults["Release storage and box/do"], a.troubled = failsBefore, true
	a.mu.Unlock()
	a.runsOut()
	a.mu.Lock()
	clear(a.faults)
	a.mu.Unlock()
	if !a.s.Stuck || !a.s.Unclean {
		a.fail("its release has not failed")
	}
}

// TestTheModelKnowsTheWaysOutOfAFailedRelease requests both where they are possible and where not, and compares the
// service with the model.
func TestTheModelKnowsTheWaysOutOfAFailedRelease(t *testing.T) {
	g := newStage(t, nil)
	for name, script := range map[string]func(a *scenario){
		"retry of what is stuck": func(a *scenario) {
			a.request(request{verb: askRetryRelease})
			a.request(request{verb: askRetryRelease}) // its run is open again
			a.runsOut()
		},
		"retry after a step was skipped": func(a *scenario) {
			a.mu.Lock()
			a.faults["Mark decommissioned/do"] = failsBefore
			a.mu.Unlock()
			a.request(request{verb: askSkipUndo})
			a.runsOut()
			a.mu.Lock()
			clear(a.faults)
			a.mu.Unlock()
			if !a.s.Stuck || !a.s.Orphans {
				a.fail("it is not stuck with orphans: %+v", a.s)
			}
			a.request(request{verb: askRetryRelease})
			a.runsOut()
		},
		"forced": func(a *scenario) {
			a.request(request{verb: askForceRelease, who: "stranger"})
			a.request(request{verb: askForceRelease, override: true})
			a.request(request{verb: askForceRelease, noReason: true})
			a.request(request{verb: askForceRelease, who: "operator"})
			a.request(request{verb: askForceRelease})
			a.request(request{verb: askCancel})
			a.runsOut()
		},
	} {
		t.Run(name, func(t *testing.T) {
			a := &scenario{stage: g, rt: t, name: "demo", where: byProcess, keys: map[string]string{}, counts: map[string]int{}}
			a.tenant = g.tenant()
			if err := g.pool.QueryRow(t.Context(), `SELECT id::text FROM lifecycle.tenant WHERE name = $1`,
				a.tenant).Scan(&a.tenantID); err != nil {
				t.Fatal(err)
			}
			a.other = ids.New()
			defer a.leave()
			a.request(request{verb: askCreate})
			for _, verb := range releaseVerbs() {
				a.request(request{verb: verb}) // nothing was released yet
			}
			a.failsToRelease()
			script(a)
			if a.s.State != "decommissioned" || a.s.Unclean {
				t.Errorf("in the end %+v", a.s)
			}
			for _, verb := range releaseVerbs() {
				a.request(request{verb: verb})
			}
		})
	}
}
