// Package drift concludes from evidence what is wrong with a node.
//
// Evidence is what one source saw of one part of a node: recovery's record of its identity, nodeapi's record of its
// sessions, lifecycle's gate, and so on. Classify makes a verdict of it: the reason, the family in which people see it,
// the severity, who acts next and how, and the budgets of the failure matrix. The catalogue holds one row for each
// reason.
//
// Classify is pure and total. Its guarantees:
//   - the order of the evidence does not matter, and neither does evidence that is given twice;
//   - what is proven stays proven: evidence of one more thing that is wrong never lowers the severity, and evidence
//     that a part is well clears nothing that another source saw; but that the agent is heard ends what rests on its
//     silence;
//   - what a host reports of itself, and the identity that a refused connection shows, are unproven. Unproven evidence
//     counts only while the agent is not connected, and explains why it is not. It never makes a node healthy or
//     secure, and only a certificate that the ingress refuses makes it P0;
//   - stale evidence does not count, and is named as missing if no reason is known;
//   - it allocates nothing, except for a next action that has a path in it.
//
// What a host reports comes with the events of its sessions, or by a person who brings the record of a host that
// reaches no API (MergeHost). It counts for a day at most, never as of a time in the future, and only until a session
// is admitted: what was seen before that is over. A failure that was not seen again when it would have been tried again
// is over too. Codes that name no reason explain why an agent is not heard: their text stands beside that verdict.
//
// Evidence is kept by a consumer of events, in rows that change when what was seen changes. A Judge concludes the
// verdicts on the nodes whose evidence has changed, and on those that have been silent for too long, and writes each
// that differs from the present one with its event. It relies on the order of events and on the database's clock. It
// decides nothing about an identity, a session or a gate: it tells what follows from them. Its guarantees:
//   - of replicas that judge at once, one writes a verdict; one that dies leaves its work to the others;
//   - evidence that this build cannot read hides nothing that it can read: a worse verdict is written, a milder one is
//     left to a replica of the newer build;
//   - a verdict is written when its reason changes, who acts next and how, or what the host's record explains, or when
//     its node begins or ends to be healthy, and never because time passes;
//   - a node is proven healthy by five items (Checklist), and probed only after a reason of its own has ended: a node
//     that connects again costs no probe and no event;
//   - a node is judged silent only if a replica of nodeapi listened for the whole threshold (package silence), and an
//     outage of nodeapi is one verdict, whatever the number of nodes.
//
// Which of the reasons wins where several hold, worst first:
//
//	P0   copied identity · reused token · revoked or fenced · rollback · issuer not trusted
//	P1   held · join state lost · outage (not connected) · disk · host runtime · clock · trust, endpoints and tokens
//	P1   unreachable, if nothing tells whether the agent is heard and nothing unproven explains it
//	P2   rate limited · agent_down · not admitted (connected) · backlog · version · network facts
package drift
