package ledger

import (
	"go.etcd.io/bbolt"
)

// transaction is a commit that is being made: it reads the tables, overlaid with the pending changes and its own.
type transaction struct {
	tables  *bbolt.Tx
	pending map[slot][]byte
	made    map[slot][]byte
}

// get returns a value, which is valid until the transaction ends; nil if there is none.
func (t *transaction) get(from table, key []byte) []byte {
	at := slot{from, string(key)}
	if value, ok := t.made[at]; ok {
		return value
	}
	if value, ok := t.pending[at]; ok {
		return value
	}
	if bucket := t.tables.Bucket(from.bucket()); bucket != nil {
		return bucket.Get(key)
	}
	return nil
}

// put sets a value. It keeps value, which must not be nil.
func (t *transaction) put(to table, key, value []byte) { t.made[slot{to, string(key)}] = value }

func (t *transaction) remove(from table, key []byte) { t.made[slot{from, string(key)}] = nil }
