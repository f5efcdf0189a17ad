package readmodel_test

import (
	"context"
	"testing"
	"time"

	"connectrpc.com/connect"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
)

// openWatch opens a watch as the holder of the token and waits for its first frame. The returned function ends the
// watch and waits for its end.
func (k *kit) openWatch(token string) (func(), error) {
	k.t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(k.t.Context()), 5*time.Minute)
	topics := []readmodelv1.Topic{readmodelv1.Topic_TOPIC_WORKSPACES}
	stream, err := k.query(token).Watch(ctx, &readmodelv1.WatchRequest{Topics: topics})
	if err == nil && !stream.Receive() {
		err = stream.Err()
	}
	if err != nil {
		cancel()
		return nil, err
	}
	end := func() {
		cancel()
		for stream.Receive() { // what was sent before the end is of no interest
		}
		_ = stream.Close()
	}
	k.t.Cleanup(end)
	return end, nil
}

// fill opens watches as the holder of the token until one is refused, at most limit, and returns their ends and the
// refusal.
func (k *kit) fill(token string, limit int) ([]func(), error) {
	k.t.Helper()
	var ends []func()
	for range limit {
		end, err := k.openWatch(token)
		if err != nil {
			return ends, err
		}
		ends = append(ends, end)
	}
	return ends, nil
}

// TestWatchesOfOneTenantLeavePlacesForOthers: with 64 places a person holds 2 at most, a tenant 8, and 16 are kept for
// operators.
func TestWatchesOfOneTenantLeavePlacesForOthers(t *testing.T) {
	const total, person, tenant = 64, 2, 8
	k := newKit(t)
	cfg := k.config
	cfg.WatchStreams = total
	k.service = k.start(cfg)
	refused := func(err error, reason commonv1.Reason) {
		t.Helper()
		if connect.CodeOf(err) != connect.CodeResourceExhausted {
			t.Errorf("refused with %v", err)
		}
		d := fault.FromConnect(err)
		if fault.ReasonOf(d) != reason || fault.RetryAfterOf(d) <= 0 || fault.ActionOf(d) != commonv1.Action_ACTION_WAIT {
			t.Errorf("refused with %v, retry after %v", d, fault.RetryAfterOf(d))
		}
	}
	first := k.tokenOf("mallory", k.A.ID, "tenant")
	ends, err := k.fill(first, total)
	if len(ends) != person {
		t.Fatalf("one person holds %d of %d places", len(ends), total)
	}
	refused(err, commonv1.Reason_REASON_RATE_LIMITED)
	// A second session of the same person is the same person.
	if more, _ := k.fill(k.tokenOf("mallory", k.A.ID, "tenant"), 1); len(more) != 0 {
		t.Errorf("a second session has %d places more", len(more))
	}
	held := len(ends)
	for range total {
		var more []func()
		more, err = k.fill(k.tokenOf(ids.New(), k.A.ID, "tenant"), total)
		held += len(more)
		if len(more) == 0 {
			break
		}
	}
	if held != tenant {
		t.Fatalf("one tenant holds %d of %d places", held, total)
	}
	refused(err, commonv1.Reason_REASON_RATE_LIMITED)

	if _, err := k.openWatch(k.tokenOf("bob", k.B.ID, "tenant")); err != nil {
		t.Errorf("another tenant is refused: %v", err)
	}
	if _, err := k.openWatch(k.tokenOf("op", "", "operator")); err != nil {
		t.Errorf("an operator is refused: %v", err)
	}
	// A released place comes back, to the tenant and to the person.
	ends[0]()
	again := 0
	testkit.Eventually(t, testkit.Patience, func() error {
		more, err := k.fill(first, total)
		again += len(more)
		if again == 0 {
			return err
		}
		return nil
	})
	if again != 1 {
		t.Errorf("of one released place %d came back", again)
	}
}

// TestOperatorsWatchWhereAllOtherPlacesAreTaken: the places that are kept for operators are given only to operators.
func TestOperatorsWatchWhereAllOtherPlacesAreTaken(t *testing.T) {
	k := newKit(t)
	cfg := k.config
	cfg.WatchStreams = 8 // of which 2 are kept for operators
	k.service = k.start(cfg)
	taken := 0
	for range cfg.WatchStreams + 1 {
		ends, _ := k.fill(k.tokenOf(ids.New(), "", "viewer"), cfg.WatchStreams)
		taken += len(ends)
	}
	if taken != 6 {
		t.Errorf("viewers hold %d of 8 places", taken)
	}
	for _, role := range []string{"operator", "security"} {
		if _, err := k.openWatch(k.tokenOf("of "+role, "", role)); err != nil {
			t.Errorf("%s is refused: %v", role, err)
		}
	}
	// A tenant's person with an operator's role is a tenant's person.
	_, err := k.openWatch(k.tokenOf("bob", k.B.ID, "operator"))
	if !fault.Has(fault.FromConnect(err), commonv1.Reason_REASON_OVERLOADED) {
		t.Errorf("a tenant's operator: %v", err)
	}
}
