package work

import (
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/services/nodeapi/authority"
	"github.com/gpuaas/mesh/services/nodeapi/roster"
)

// Offers sends leased tasks to the sessions that they are leased to. It has no state.
type Offers struct {
	roster  *roster.Roster
	view    *authority.View
	metrics Metrics
}

// NewOffers makes an Offers.
func NewOffers(r *roster.Roster, v *authority.View, m Metrics) *Offers {
	return &Offers{roster: r, view: v, metrics: m}
}

// Offer sends tasks that lifecycle leased to sessions of this replica without a request. It returns the sessions that
// may not be given work; tasks leased to them are leased again later, like any task that was leased and not offered.
func (o *Offers) Offer(res *lifecyclev1.LeaseTasksResponse) []*lifecyclev1.NodeSession {
	if failpoint.Hit("nodeapi.lease.before_offer") != nil {
		return nil
	}
	var out []*lifecyclev1.NodeSession
	for _, t := range res.GetTasks() {
		s := o.roster.Current(t.GetNodeId())
		if s == nil || s.ID != t.GetSessionId() || !o.offer(s, t) {
			out = append(out, &lifecyclev1.NodeSession{NodeId: t.GetNodeId(), SessionId: t.GetSessionId()})
		}
	}
	return out
}

// offer sends a task to the session that it is leased to. It reports whether the session may be given work.
func (o *Offers) offer(s *roster.Session, t *lifecyclev1.LeasedTask) bool {
	if !o.view.MayDispatch(t.GetNodeId(), s.ID, s.Generation()) || !s.MayLease() {
		return false
	}
	if s.Send(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_TaskOffer{TaskOffer: t.GetOffer()}}) {
		o.metrics.Offered(1)
	}
	return true
}
