package session

import "container/list"

// lru is a map of bounded size that drops the least recently used entry. The owner's lock must be held.
type lru[K comparable, V any] struct {
	most    int
	entries map[K]*list.Element
	order   *list.List // of *lruEntry, the one used last at the back
}

type lruEntry[K comparable, V any] struct {
	key   K
	value V
}

func newLRU[K comparable, V any](most int) *lru[K, V] {
	return &lru[K, V]{most: most, entries: map[K]*list.Element{}, order: list.New()}
}

// get returns the value of a key. It does not count as a use.
func (l *lru[K, V]) get(key K) (V, bool) {
	if e := l.entries[key]; e != nil {
		return entryOf[K, V](e).value, true
	}
	var none V
	return none, false
}

// put stores a value as the most recently used one.
func (l *lru[K, V]) put(key K, value V) {
	if e := l.entries[key]; e != nil {
		entryOf[K, V](e).value = value
		l.order.MoveToBack(e)
		return
	}
	l.entries[key] = l.order.PushBack(&lruEntry[K, V]{key: key, value: value})
	for len(l.entries) > l.most {
		l.drop(l.order.Front())
	}
}

func (l *lru[K, V]) remove(key K) {
	if e := l.entries[key]; e != nil {
		l.drop(e)
	}
}

// trim drops entries, the least recently used first, for as long as over returns true for them.
func (l *lru[K, V]) trim(over func(V) bool) {
	for e := l.order.Front(); e != nil && over(entryOf[K, V](e).value); e = l.order.Front() {
		l.drop(e)
	}
}

func (l *lru[K, V]) drop(e *list.Element) {
	delete(l.entries, entryOf[K, V](e).key)
	l.order.Remove(e)
}

func entryOf[K comparable, V any](e *list.Element) *lruEntry[K, V] {
	entry, _ := e.Value.(*lruEntry[K, V])
	return entry
}
