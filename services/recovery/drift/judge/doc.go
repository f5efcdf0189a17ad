// Package judge concludes the verdicts on nodes and on the control plane.
//
// A Judge takes the nodes whose evidence has changed, and those that have been silent for too long, and writes each
// verdict that differs from the present one with its event. It relies on the order of events and on the database's
// clock. It decides nothing about an identity, a session or a gate: it tells what follows from them. Its guarantees:
//   - of replicas that judge at once, one writes a verdict; one that dies leaves its work to the others;
//   - evidence that this build cannot read hides nothing that it can read: a worse verdict is written, a milder one is
//     left to a replica of the newer build;
//   - a verdict is written when its reason changes, who acts next and how, or what the host's record explains, or when
//     its node begins or ends to be healthy, and never because time passes;
//   - a node is proven healthy by five items (Checklist), and probed only after a reason of its own has ended: a node
//     that connects again costs no probe and no event;
//   - a node is judged silent only if a replica of nodeapi listened for the whole threshold (package silence), and an
//     outage of nodeapi is one verdict, whatever the number of nodes.
package judge
