// Package actions keeps recovery actions: what is done to have a node, or the control plane, healthy again, each from
// the first rejection to the healthy verdict. It decides nothing: the packages that act write here, in the transaction
// of what they do, what it is.
//
// Guarantees:
//   - of a node and a kind at most one action is open (an index of the database); one that begins a second
//     one at the same time joins the first;
//   - one correlation id is that of the rejection, where there was one, of the action, of the enrolment that it brings,
//     of the first session on its certificate, and of the verdict that ends it;
//   - each change of an action is one event (`recovery_action.changed`) with the whole row. No row changes because time
//     passes, but that an open one fails at its time;
//   - an action whose kind, state or reason is of a newer build is set aside alone: it is shown as it is stored, and
//     changed by replicas of that build only.
//
// Rows of actions are locked after all other rows of a transaction, in the order of nodes and kinds.
package actions
