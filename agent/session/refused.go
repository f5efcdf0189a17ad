package session

import (
	"crypto/tls"
	"slices"
	"time"

	"github.com/gpuaas/mesh/internal/pki"
)

// leastRefusals is how many handshakes in a row the server has to end, because of certificates that have not expired,
// before Run does. It is more if the node API has more addresses.
const leastRefusals = 3

// refusals are the handshakes that the server ended because of this node's certificates since a session was admitted.
// The server was verified in each: in TLS 1.3 it refuses a client only after it has proven its own name, and an alert
// before that is no refusal. Other failures between two of them change nothing: TCP may lose the alert of a server that
// closes the connection at once, so that some refusals look like a connection that broke.
type refusals struct {
	count int
	last  time.Time
	due   time.Time // before which Run does not end
}

// refusedForGood counts a handshake that the server ended because of the certificate, and reports whether Run is to
// end. The control plane gets the time to find out that the ingress refuses what the authority issues, in which case it
// issues nothing. A random time beyond that keeps a fleet that is refused at one moment from enrolling at one moment.
func (r *runner) refusedForGood() bool {
	if r.active != nil {
		return false // the session stands
	}
	cfg, now := r.c.cfg, time.Now()
	if r.refused.count == 0 || now.Sub(r.refused.last) > cfg.RefusedFor+cfg.RefusedSpread+cfg.SlowRetry {
		// What was refused long before may have been repaired meanwhile, and drift again.
		r.refused = refusals{due: now.Add(cfg.RefusedFor + r.c.jitter(cfg.RefusedSpread))}
	}
	r.refused.count++
	r.refused.last = now
	return r.refused.count >= max(leastRefusals, r.c.route.Round()) && !now.Before(r.refused.due)
}

// reject keeps that the server refused a certificate.
func (r *runner) reject(cert *tls.Certificate) {
	if cert == nil || cert.Leaf == nil {
		return
	}
	if serial := pki.SerialString(cert.Leaf.SerialNumber); !slices.Contains(r.rejected, serial) {
		r.rejected = append(r.rejected, serial)
	}
}
