package batch

import (
	"fmt"
	"sync"

	"google.golang.org/protobuf/proto"
)

// Encoded keeps requests that wait for their call in their encoded form, many in one piece of memory, which goes back
// as a whole once none of them is used any more. The zero value is ready to use, by several goroutines.
type Encoded struct {
	mu    sync.Mutex
	piece []byte
}

// PieceSize is the size of a piece in bytes. A request that is larger has a piece of its own.
const PieceSize = 64 << 10

// Keep returns m in its encoded form.
func (e *Encoded) Keep(m proto.Message) ([]byte, error) {
	size := proto.Size(m)
	e.mu.Lock()
	defer e.mu.Unlock()
	if cap(e.piece)-len(e.piece) < size {
		e.piece = make([]byte, 0, max(PieceSize, size))
	}
	from := len(e.piece)
	piece, err := proto.MarshalOptions{UseCachedSize: true}.MarshalAppend(e.piece, m)
	if err != nil {
		return nil, fmt.Errorf("encode a request: %w", err)
	}
	e.piece = piece
	return piece[from:len(piece):len(piece)], nil
}
