package rpc

import "context"

// ActorFrom returns the actor of a call for the audit log: the person that it is made for, else the service that makes
// it.
func ActorFrom(ctx context.Context) string {
	if p, ok := PersonFrom(ctx); ok {
		return p.Subject
	}
	if peer, ok := PeerFrom(ctx); ok {
		return string(peer.ID.Kind) + "/" + peer.ID.Name
	}
	return "unknown"
}
