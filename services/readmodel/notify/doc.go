// Package notify notes which workspaces a fault touches, and what their people are notified of.
//
// It owns readmodel.impact, a row for each layer of each workspace that is or was touched, and readmodel.notification,
// the text for the people of the tenant and for those of the operator. It believes the projections, which queue the
// nodes and workspaces that a change may touch (readmodel.impact_due), and package status, which describes layers and
// families for the lists of workspaces too: there is no second rule. It decides about no workspace, and sends nothing:
// people read what it wrote.
//
//	projection ──► impact_due ──► Notifier: workspaces of the due → layers as they are now
//	    ──► begun, changed, ended ──► impact + notification
//
// Guarantees: a workspace has at most one open row for each layer, and the gravest family of them is its user state;
// the rows follow from the present state, so that events which are applied again, in any order, and rebuilt projections
// make no other rows; what returns within the window in which repetitions are counted is the same row with a higher
// count; an impact ends on evidence, not because evidence is missing; a change that touches one node costs as much as
// that node has workspaces, and one of the whole fleet makes rows only for workspaces that evidence about their own
// node or their own workloads touches.
package notify
