// Package drift concludes from evidence what is wrong with a node.
//
// Evidence is what one source saw of one part of a node: recovery's record of its identity, nodeapi's record of its
// sessions, lifecycle's gate, and so on. Classify makes a verdict of it: the reason, the family in which people see it,
// the severity, who acts next and how, and the budgets of the failure matrix. The catalogue holds one row for each
// reason. Package collect keeps evidence, and package judge concludes the verdicts on all nodes.
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
// Which of the reasons wins where several hold, worst first:
//
//	P0   copied identity · reused token · revoked or fenced · rollback · issuer not trusted
//	P1   held · join state lost · outage (not connected) · disk · host runtime · clock · trust, endpoints and tokens
//	P1   unreachable, if nothing tells whether the agent is heard and nothing unproven explains it
//	P2   rate limited · agent_down · not admitted (connected) · backlog · version · network facts
package drift
