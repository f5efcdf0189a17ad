// Package trust owns the preflight: whether the ingress, which ends the TLS of nodes, trusts the certificates that the
// authority issues.
//
// One replica of recovery checks at a time, under a lease. A check compares what the authority reports that it signs
// with to what each replica of nodeapi publishes that it trusts, and makes a handshake with a canary certificate
// against the address that agents are told and against each replica's own. A canary certificate is as a node's, but of
// a name that no node has (pki.CanaryID).
//
// It believes handshakes alone. Fingerprints begin a check at once and tell which side has changed. Guarantees:
//   - only a handshake that was refused for the certificate counts, and only twice in a row at one address, the second
//     time with a fresh certificate: an ingress that is unreachable, slow, or closes the connection proves nothing;
//   - a mismatch is one row, one event, one incident. It ends when two checks in a row succeed at each address that
//     refused, and not because nothing can be proven any more;
//   - while it lasts nothing is issued: Refuse, which enrolment calls in the transactions of its claims and of its
//     certificates, refuses with an action on which agents wait;
//   - it ends no session and changes no identity.
package trust
