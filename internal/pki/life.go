package pki

import (
	"crypto/x509"
	"time"
)

// Backdate is how long before its issue a node's certificate becomes valid, for hosts whose clocks are a little behind.
const Backdate = time.Minute

// maxLead bounds Lead.
const maxLead = time.Minute

// Life returns how long a certificate serves from its issue to its end. The time by which authorities date
// certificates back is no part of it: of a certificate for 20 s that begins a minute before its issue, more than half
// has always passed.
func Life(leaf *x509.Certificate) time.Duration {
	span := leaf.NotAfter.Sub(leaf.NotBefore)
	if span > Backdate {
		return span - Backdate
	}
	return span
}

// Lead returns how long before the end of a certificate of that life the session with its successor is due: a sixth of
// the life, at most a minute.
func Lead(life time.Duration) time.Duration { return min(maxLead, max(life, 0)/6) }
