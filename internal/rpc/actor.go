package rpc

import "context"

// ActorFrom names who is behind a call, for the record: the person it is made for, else the service that makes it.
func ActorFrom(ctx context.Context) string {
	if p, ok := PersonFrom(ctx); ok {
		return p.Subject
	}
	if peer, ok := PeerFrom(ctx); ok {
		return string(peer.ID.Kind) + "/" + peer.ID.Name
	}
	return "unknown"
}
