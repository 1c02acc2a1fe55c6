//! Parses tokens by the grammar that Microsoft publishes with its .NET SDK.
//!
//! The parser follows the service where that grammar is too narrow: BETWEEN may appear beside AND and OR, and a sign
//! before a number is an operator.

use super::error::SyntaxError;
use super::lexer::{is_word, tokens, Token, TokenKind};
use super::syntax::{Collection, Expression, Function, Name, Select, Selection, Sort, Source, Step};

/// The deepest nesting that the parser accepts. Deeper texts could exhaust the stack.
pub(super) const MAX_DEPTH: usize = 64;

const BINARY: &[&str] = &["*", "/", "%", "+", "-", "<", ">", ">=", "<=", "=", "!=", "&", "^", "|", "||"];

type Parsed<T> = Result<T, SyntaxError>;

/// A member access by name in brackets, with the positions of both brackets.
#[derive(Clone, Debug)]
pub(super) struct Bracket {
    pub start: usize,
    pub end: usize,
    pub name: String,
}

/// A text that follows the grammar, as a tree and as tokens.
pub(super) struct ParsedText {
    pub select: Select,
    pub tokens: Vec<Token>,
    pub brackets: Vec<Bracket>,
}

/// Parses a complete text.
pub(super) fn parse_text(text: &str) -> Parsed<ParsedText> {
    let mut parser = Parser { text, tokens: tokens(text)?, at: 0, depth: 0, brackets: Vec::new() };
    let select = parser.select()?;
    if !parser.peek().is_end() {
        return Err(parser.unexpected("the end of the query"));
    }
    Ok(ParsedText { select, tokens: parser.tokens, brackets: parser.brackets })
}

struct Parser<'a> {
    text: &'a str,
    /// Never empty: the last token is the end, and the parser does not advance past it.
    tokens: Vec<Token>,
    at: usize,
    depth: usize,
    brackets: Vec<Bracket>,
}

/// Parses clauses.
impl Parser<'_> {
    fn select(&mut self) -> Parsed<Select> {
        self.expect_keyword("SELECT")?;
        Ok(Select {
            distinct: self.take_keyword("DISTINCT"),
            top: self.optional("TOP", Self::count)?,
            selection: self.selection()?,
            from: self.optional("FROM", Self::collections)?.unwrap_or_default(),
            filter: self.optional("WHERE", Self::expression)?,
            group_by: self.optional("GROUP", Self::group_by)?.unwrap_or_default(),
            order_by: self.optional("ORDER", Self::order_by)?.unwrap_or_default(),
            window: self.optional("OFFSET", Self::window)?.unwrap_or_default(),
        })
    }

    fn optional<T>(&mut self, keyword: &str, clause: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<Option<T>> {
        if self.take_keyword(keyword) {
            clause(self).map(Some)
        } else {
            Ok(None)
        }
    }

    fn selection(&mut self) -> Parsed<Selection> {
        if self.take_symbol("*") {
            Ok(Selection::Star)
        } else if self.take_keyword("VALUE") {
            self.expression().map(Selection::Value)
        } else {
            self.list(Self::select_item).map(Selection::List)
        }
    }

    fn select_item(&mut self) -> Parsed<Expression> {
        let item = self.expression()?;
        self.optional("AS", Self::name)?;
        Ok(item)
    }

    /// Parses a number of results, or a parameter for it.
    fn count(&mut self) -> Parsed<Expression> {
        match self.peek().kind {
            TokenKind::Number | TokenKind::Parameter => self.atom(),
            _ => Err(self.unexpected("a number or a parameter")),
        }
    }

    fn collections(&mut self) -> Parsed<Vec<Collection>> {
        let mut collections = vec![self.collection()?];
        while self.take_keyword("JOIN") {
            collections.push(self.collection()?);
        }
        Ok(collections)
    }

    fn collection(&mut self) -> Parsed<Collection> {
        if self.peek().is_name() && self.peek_after().is_keyword("IN") {
            let alias = Some(self.name()?.name);
            self.expect_keyword("IN")?;
            return Ok(Collection { source: self.source()?, alias, iterates: true });
        }
        let source = self.source()?;
        let named = self.take_keyword("AS") || self.peek().is_name();
        let alias = if named { Some(self.name()?.name) } else { None };
        Ok(Collection { source, alias, iterates: false })
    }

    fn source(&mut self) -> Parsed<Source> {
        if self.peek().is_symbol("(") {
            return self.subquery().map(Source::Query);
        }
        let root = self.name()?;
        let mut steps = Vec::new();
        while let Some(step) = self.source_step()? {
            steps.push(step);
        }
        Ok(Source::Path { root, steps })
    }

    fn source_step(&mut self) -> Parsed<Option<Step>> {
        if self.take_symbol(".") {
            return Ok(Some(Step::Property(self.name()?.name)));
        }
        if !self.take_symbol("[") {
            return Ok(None);
        }
        let step = self.source_index()?;
        self.expect_symbol("]")?;
        Ok(Some(step))
    }

    fn source_index(&mut self) -> Parsed<Step> {
        if let TokenKind::Text(name) = self.peek().kind.clone() {
            self.advance();
            return Ok(Step::Property(name));
        }
        if !self.take_symbol("-") {
            self.take_symbol("+");
        }
        match self.peek().kind {
            TokenKind::Number => {
                self.advance();
                Ok(Step::Element)
            }
            _ => Err(self.unexpected("a number or a string")),
        }
    }

    fn group_by(&mut self) -> Parsed<Vec<Expression>> {
        self.expect_keyword("BY")?;
        self.list(Self::expression)
    }

    fn order_by(&mut self) -> Parsed<Vec<Sort>> {
        self.expect_keyword("BY")?;
        if self.take_keyword("RANK") {
            self.list(|parser| parser.sort(Self::score))
        } else {
            self.list(|parser| parser.sort(Self::expression))
        }
    }

    fn sort(&mut self, key: impl FnOnce(&mut Self) -> Parsed<Expression>) -> Parsed<Sort> {
        let key = key(self)?;
        let descending = self.take_keyword("DESC");
        if !descending {
            self.take_keyword("ASC");
        }
        Ok(Sort { key, descending })
    }

    /// Parses a key of ORDER BY RANK, which accepts only function calls.
    fn score(&mut self) -> Parsed<Expression> {
        let first = self.peek().clone();
        match self.primary()? {
            call @ Expression::Call(_) => Ok(call),
            _ => Err(SyntaxError::unexpected(self.text, &first, "a function call")),
        }
    }

    fn window(&mut self) -> Parsed<Vec<Expression>> {
        let offset = self.count()?;
        self.expect_keyword("LIMIT")?;
        Ok(vec![offset, self.count()?])
    }
}

/// Parses expressions.
impl Parser<'_> {
    fn expression(&mut self) -> Parsed<Expression> {
        self.nested(Self::conditional)
    }

    fn conditional(&mut self) -> Parsed<Expression> {
        let mut parts = vec![self.logical()?];
        loop {
            if self.take_symbol("??") {
                parts.push(self.logical()?);
            } else if self.take_symbol("?") {
                parts.push(self.expression()?);
                self.expect_symbol(":")?;
                parts.push(self.expression()?);
            } else {
                return Ok(combined(parts));
            }
        }
    }

    fn logical(&mut self) -> Parsed<Expression> {
        let mut parts = vec![self.predicate()?];
        while self.take_keyword("AND") || self.take_keyword("OR") {
            parts.push(self.predicate()?);
        }
        Ok(combined(parts))
    }

    fn predicate(&mut self) -> Parsed<Expression> {
        let mut parts = vec![self.binary()?];
        let negated = self.take_keyword("NOT");
        if self.take_keyword("IN") {
            self.expect_symbol("(")?;
            parts.append(&mut self.list(Self::expression)?);
            self.expect_symbol(")")?;
        } else if self.take_keyword("LIKE") {
            parts.push(self.binary()?);
            self.optional("ESCAPE", Self::text)?;
        } else if self.take_keyword("BETWEEN") {
            parts.push(self.binary()?);
            self.expect_keyword("AND")?;
            parts.push(self.binary()?);
        } else if negated {
            return Err(self.unexpected("IN, LIKE or BETWEEN"));
        }
        Ok(combined(parts))
    }

    fn binary(&mut self) -> Parsed<Expression> {
        let mut parts = vec![self.unary()?];
        while BINARY.iter().any(|operator| self.take_symbol(operator)) {
            parts.push(self.unary()?);
        }
        Ok(combined(parts))
    }

    fn unary(&mut self) -> Parsed<Expression> {
        let mut operators = 0;
        while ["-", "+", "~"].iter().any(|operator| self.take_symbol(operator)) || self.take_keyword("NOT") {
            operators += 1;
        }
        let operand = self.primary()?;
        // An expression with a sign or NOT is no longer a plain parameter, literal or name.
        Ok(if operators == 0 { operand } else { Expression::Parts(vec![operand]) })
    }

    fn primary(&mut self) -> Parsed<Expression> {
        let base = self.atom()?;
        let mut steps = Vec::new();
        while let Some(step) = self.step()? {
            steps.push(step);
        }
        if steps.is_empty() {
            return Ok(base);
        }
        Ok(Expression::Member { base: Box::new(base), steps })
    }

    fn step(&mut self) -> Parsed<Option<Step>> {
        if self.take_symbol(".") {
            return Ok(Some(Step::Property(self.name()?.name)));
        }
        let start = self.peek().start;
        if !self.take_symbol("[") {
            return Ok(None);
        }
        let index = self.expression()?;
        self.expect_symbol("]")?;
        Ok(Some(self.indexed(start, index)))
    }

    fn indexed(&mut self, start: usize, index: Expression) -> Step {
        match index {
            Expression::Text(name) => {
                if is_word(&name) {
                    let end = self.tokens[self.at - 1].end;
                    self.brackets.push(Bracket { start, end, name: name.clone() });
                }
                Step::Property(name)
            }
            Expression::Literal => Step::Element,
            index => Step::Computed(index),
        }
    }

    fn atom(&mut self) -> Parsed<Expression> {
        match self.peek().kind.clone() {
            TokenKind::Text(text) => Ok(self.leaf(Expression::Text(text))),
            TokenKind::Number | TokenKind::Keyword("true" | "false" | "null" | "undefined") => {
                Ok(self.leaf(Expression::Literal))
            }
            TokenKind::Parameter => {
                let name = self.peek().text(self.text).to_owned();
                Ok(self.leaf(Expression::Parameter(name)))
            }
            TokenKind::Symbol("[") => self.array(),
            TokenKind::Symbol("{") => self.object(),
            TokenKind::Symbol("(") => self.parenthesised(),
            TokenKind::Keyword("EXISTS" | "ARRAY") => {
                self.advance();
                self.subquery().map(Expression::Subquery)
            }
            TokenKind::Keyword("LEFT" | "RIGHT") => {
                let name = self.peek().text(self.text).to_owned();
                self.advance();
                self.call(name, false)
            }
            TokenKind::Keyword("udf") => {
                self.advance();
                self.expect_symbol(".")?;
                let name = self.name()?.name;
                self.call(name, true)
            }
            _ => self.named(),
        }
    }

    fn leaf(&mut self, leaf: Expression) -> Expression {
        self.advance();
        leaf
    }

    /// Parses a name, a call, or ALL, FIRST or LAST of a subquery.
    fn named(&mut self) -> Parsed<Expression> {
        let of_subquery = matches!(self.peek().kind, TokenKind::Keyword(_)) && self.is_subquery(1);
        let name = self.name_or("an expression")?;
        if of_subquery {
            self.subquery().map(Expression::Subquery)
        } else if self.peek().is_symbol("(") {
            self.call(name.name, false)
        } else {
            Ok(Expression::Name(name))
        }
    }

    fn call(&mut self, name: String, is_udf: bool) -> Parsed<Expression> {
        self.expect_symbol("(")?;
        let arguments = self.list_until(")", Self::expression)?;
        Ok(Expression::Call(Function { name, is_udf, arguments }))
    }

    fn array(&mut self) -> Parsed<Expression> {
        self.expect_symbol("[")?;
        self.list_until("]", Self::expression).map(Expression::Parts)
    }

    fn object(&mut self) -> Parsed<Expression> {
        self.expect_symbol("{")?;
        self.list_until("}", Self::property).map(Expression::Parts)
    }

    fn property(&mut self) -> Parsed<Expression> {
        self.text()?;
        self.expect_symbol(":")?;
        self.expression()
    }

    fn parenthesised(&mut self) -> Parsed<Expression> {
        if self.is_subquery(0) {
            return self.subquery().map(Expression::Subquery);
        }
        self.expect_symbol("(")?;
        let inner = self.expression()?;
        self.expect_symbol(")")?;
        Ok(inner)
    }

    fn subquery(&mut self) -> Parsed<Box<Select>> {
        self.expect_symbol("(")?;
        let select = self.nested(Self::select)?;
        self.expect_symbol(")")?;
        Ok(Box::new(select))
    }
}

/// Reads tokens.
impl Parser<'_> {
    fn nested<T>(&mut self, part: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<T> {
        if self.depth == MAX_DEPTH {
            return Err(SyntaxError::too_deep(self.text, self.peek(), MAX_DEPTH));
        }
        self.depth += 1;
        let parsed = part(self);
        self.depth -= 1;
        parsed
    }

    fn list<T>(&mut self, item: impl Fn(&mut Self) -> Parsed<T>) -> Parsed<Vec<T>> {
        let mut items = vec![item(self)?];
        while self.take_symbol(",") {
            items.push(item(self)?);
        }
        Ok(items)
    }

    /// Parses a list that may be empty, and the symbol that ends it.
    fn list_until<T>(&mut self, end: &str, item: impl Fn(&mut Self) -> Parsed<T>) -> Parsed<Vec<T>> {
        if self.take_symbol(end) {
            return Ok(Vec::new());
        }
        let items = self.list(item)?;
        self.expect_symbol(end)?;
        Ok(items)
    }

    fn name(&mut self) -> Parsed<Name> {
        self.name_or("a name that is not a reserved word")
    }

    fn name_or(&mut self, expected: &str) -> Parsed<Name> {
        if !self.peek().is_name() {
            return Err(self.unexpected(expected));
        }
        let token = self.peek();
        let name = Name { name: token.text(self.text).to_owned(), start: token.start };
        self.advance();
        Ok(name)
    }

    fn text(&mut self) -> Parsed<()> {
        if !matches!(self.peek().kind, TokenKind::Text(_)) {
            return Err(self.unexpected("a string"));
        }
        self.advance();
        Ok(())
    }

    /// Whether a parenthesis with a SELECT in it begins `ahead` tokens from here.
    fn is_subquery(&self, ahead: usize) -> bool {
        let is = |at: usize, holds: &dyn Fn(&Token) -> bool| self.tokens.get(at).is_some_and(holds);
        let at = self.at + ahead;
        is(at, &|token| token.is_symbol("(")) && is(at + 1, &|token| token.is_keyword("SELECT"))
    }

    fn take_keyword(&mut self, keyword: &str) -> bool {
        let found = self.peek().is_keyword(keyword);
        if found {
            self.advance();
        }
        found
    }

    fn take_symbol(&mut self, symbol: &str) -> bool {
        let found = self.peek().is_symbol(symbol);
        if found {
            self.advance();
        }
        found
    }

    fn expect_keyword(&mut self, keyword: &str) -> Parsed<()> {
        if self.take_keyword(keyword) {
            Ok(())
        } else {
            Err(self.unexpected(keyword))
        }
    }

    fn expect_symbol(&mut self, symbol: &str) -> Parsed<()> {
        if self.take_symbol(symbol) {
            Ok(())
        } else {
            Err(self.unexpected(&format!("'{symbol}'")))
        }
    }

    fn unexpected(&self, expected: &str) -> SyntaxError {
        SyntaxError::unexpected(self.text, self.peek(), expected)
    }

    fn peek(&self) -> &Token {
        &self.tokens[self.at]
    }

    fn peek_after(&self) -> &Token {
        self.tokens.get(self.at + 1).unwrap_or(self.peek())
    }

    fn advance(&mut self) {
        if self.at + 1 < self.tokens.len() {
            self.at += 1;
        }
    }
}

/// Combines the parts of an expression. A single part is returned as it is.
fn combined(mut parts: Vec<Expression>) -> Expression {
    if parts.len() == 1 {
        parts.remove(0)
    } else {
        Expression::Parts(parts)
    }
}
