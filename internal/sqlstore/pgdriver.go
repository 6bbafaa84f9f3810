package sqlstore

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/stdlib"
)

// The types of this file stand between database/sql and the driver of Postgres, so that no query and no caller needs to know
// which database it is for: they number arguments as Postgres does, bring values into a form that it keeps and say errors in
// our words.

type connector struct{ driver.Connector }

func (c connector) Connect(ctx context.Context) (driver.Conn, error) {
	inner, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, inWords(err)
	}
	return conn{inner.(*stdlib.Conn)}, nil
}

type conn struct{ *stdlib.Conn }

func (c conn) BeginTx(ctx context.Context, o driver.TxOptions) (driver.Tx, error) {
	inner, err := c.Conn.BeginTx(ctx, o)
	if err != nil {
		return nil, inWords(elsewhere(err))
	}
	return tx{inner}, nil
}

func (c conn) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	inner, err := c.Conn.PrepareContext(ctx, dollars(query))
	if err != nil {
		return nil, inWords(elsewhere(err))
	}
	return stmt{inner.(*stdlib.Stmt)}, nil
}

func (c conn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	if len(args) > 0 { // a migration has none, and may have a question mark
		query = dollars(query)
	}
	result, err := c.Conn.ExecContext(ctx, query, args)
	return result, inWords(err)
}

func (c conn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	inner, err := c.Conn.QueryContext(ctx, dollars(query), args)
	if err != nil {
		return nil, inWords(elsewhere(err))
	}
	return rows{inner}, nil
}

// CheckNamedValue brings a value into a form that Postgres keeps: a truth is 0 or 1, as in SQLite, and text has neither a NUL nor
// what is not UTF-8. Both could only come from a caller who means no good, whose words are not worth a failure.
func (c conn) CheckNamedValue(v *driver.NamedValue) error {
	switch value := v.Value.(type) {
	case bool:
		v.Value = int64(0)
		if value {
			v.Value = int64(1)
		}
	case string:
		if strings.IndexByte(value, 0) >= 0 || !utf8.ValidString(value) {
			v.Value = strings.ToValidUTF8(strings.ReplaceAll(value, "\x00", "\uFFFD"), "\uFFFD")
		}
	}
	return nil
}

type stmt struct{ *stdlib.Stmt }

func (s stmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	result, err := s.Stmt.ExecContext(ctx, args)
	return result, inWords(err)
}

func (s stmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	inner, err := s.Stmt.QueryContext(ctx, args)
	if err != nil {
		return nil, inWords(elsewhere(err))
	}
	return rows{inner}, nil
}

// elsewhere has database/sql try again on another connection where this one was lost, as all are when Postgres restarts. That is
// right for what changes nothing: a beginning, and queries, which only read unless they are in a transaction; and those are
// never tried again by themselves.
func elsewhere(err error) error {
	if !lost(err) || errors.Is(err, driver.ErrBadConn) {
		return err
	}
	return fmt.Errorf("%w: %w", driver.ErrBadConn, err)
}

type rows struct{ driver.Rows }

func (r rows) Next(dest []driver.Value) error {
	err := r.Rows.Next(dest)
	if err == io.EOF { //nolint:errorlint // after the last row it is that itself; a connection that ends wraps it
		return err
	}
	return inWords(err)
}

type tx struct{ driver.Tx }

func (t tx) Commit() error { return inWords(t.Tx.Commit()) }

// dollars turns ?1 into $1, and each ? without a number into that of its place.
func dollars(query string) string {
	if !strings.Contains(query, "?") {
		return query
	}
	var b strings.Builder
	place, quoted := 0, false
	for i := 0; i < len(query); i++ {
		c := query[i]
		if c == '\'' {
			quoted = !quoted
		}
		if c != '?' || quoted {
			b.WriteByte(c)
			continue
		}
		b.WriteByte('$')
		if i+1 == len(query) || query[i+1] < '0' || query[i+1] > '9' {
			place++
			b.WriteString(strconv.Itoa(place))
		}
	}
	return b.String()
}
