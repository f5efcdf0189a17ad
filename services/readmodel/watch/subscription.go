package watch

import (
	"fmt"
	"slices"
	"sync"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/services/readmodel/list"
)

// Filter selects the objects that a watcher gets.
type Filter struct {
	Scope       list.Scope
	Topics      []readmodelv1.Topic
	WorkspaceID string // only this one's
	NodeID      string // only this one's
}

func (f Filter) wants(i item) bool {
	if i.key.topic == readmodelv1.Topic_TOPIC_NODES && !f.Scope.Everything() {
		return false // nodes are for people of the operator
	}
	return slices.Contains(f.Topics, i.key.topic) && f.Scope.Meets(i.tenantID) &&
		(f.WorkspaceID == "" || f.WorkspaceID == i.workspaceID) && (f.NodeID == "" || f.NodeID == i.nodeID)
}

// shown returns an item as this watcher may see it. A message that all watchers share is copied before fields are
// removed from it.
func (f Filter) shown(i item) item {
	if a := i.message.GetStep(); a != nil {
		if hidden := f.Scope.Step(a); hidden != a {
			i.message = &readmodelv1.WatchItem{Change: i.message.GetChange(), Object: &readmodelv1.WatchItem_Step{Step: hidden}}
		}
	}
	i = f.named(i)
	i.message = list.Shown(f.Scope, i.message)
	return i
}

// subscription has the items that wait for one watcher: the newest state of each changed object.
type subscription struct {
	filter Filter
	most   int
	ready  chan struct{}

	mu      sync.Mutex
	pending map[key]item
	order   []key
	pos     int64 // every change up to it is sent once pending is sent
	over    error // why the watcher has to take a new snapshot
}

func newSubscription(f Filter, most int, pos int64) *subscription {
	return &subscription{filter: f, most: most, pos: pos, ready: make(chan struct{}, 1), pending: map[key]item{}}
}

// offer adds changes, with which the watcher has been offered every change up to pos. It never blocks.
func (s *subscription) offer(items []item, pos int64) {
	s.mu.Lock()
	for _, i := range items {
		if s.over != nil || !s.filter.wants(i) {
			continue
		}
		i = s.filter.shown(i)
		old, waiting := s.pending[i.key]
		if !waiting {
			if len(s.pending) >= s.most {
				s.over, s.pending, s.order = errBehind, nil, nil
				continue
			}
			s.order = append(s.order, i.key)
		}
		i.created = i.created || (waiting && old.created)
		s.pending[i.key] = i
	}
	s.pos = max(s.pos, pos)
	wake := s.over != nil || len(s.pending) > 0
	s.mu.Unlock()
	if wake {
		s.wake()
	}
}

func (s *subscription) wake() {
	select {
	case s.ready <- struct{}{}:
	default:
	}
}

// end has the watcher end with an error, in place of what waits for it.
func (s *subscription) end(err error) {
	s.mu.Lock()
	s.over, s.pending, s.order = err, nil, nil
	s.mu.Unlock()
	s.wake()
}

// errBehind is the end of a watcher for which too many objects wait. Faults of one reason are equal, and this error is
// equal to itself alone.
var errBehind = fmt.Errorf("slow: %w", errExpired("the watcher fell behind"))

// take returns the items to send now, and the position that is reached once they are sent. It returns an error if the
// watcher has to take a new snapshot.
func (s *subscription) take() ([]item, int64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over != nil {
		return nil, s.pos, s.over
	}
	items := make([]item, len(s.order))
	for n, k := range s.order {
		items[n] = s.pending[k]
	}
	s.pending, s.order = map[key]item{}, nil
	return items, s.pos, nil
}

// frame returns the frame that carries an item.
func (i item) frame(change readmodelv1.Change) *readmodelv1.WatchResponse {
	if i.created && change == readmodelv1.Change_CHANGE_UPDATED {
		change = readmodelv1.Change_CHANGE_CREATED
	}
	return &readmodelv1.WatchResponse{Frame: &readmodelv1.WatchResponse_Item{Item: withChange(i, change)}}
}

// withChange returns a new message for an item. The object in it is shared by all watchers and must not be changed.
func withChange(i item, change readmodelv1.Change) *readmodelv1.WatchItem {
	return &readmodelv1.WatchItem{Topic: i.key.topic, Change: change, Id: i.key.id, Object: i.message.GetObject()}
}

// reached returns the position of a watcher to which everything has been sent; zero if items wait to be sent.
func (s *subscription) reached() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.pending) > 0 || s.over != nil {
		return 0
	}
	return s.pos
}
