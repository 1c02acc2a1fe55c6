//! Splits a query text into tokens.

use super::error::SyntaxError;

/// Words that are reserved in any case.
const RESERVED: &[&str] = &[
    "ALL", "AND", "ARRAY", "AS", "ASC", "BETWEEN", "BY", "DESC", "DISTINCT", "ESCAPE", "EXISTS", "FIRST", "FROM",
    "GROUP", "IN", "JOIN", "LAST", "LEFT", "LIKE", "LIMIT", "NOT", "OFFSET", "OR", "ORDER", "RANK", "RIGHT", "SELECT",
    "TOP", "VALUE", "WHERE",
];

/// Words that are reserved only in lower case.
const RESERVED_IN_LOWER_CASE: &[&str] = &["false", "null", "true", "udf", "undefined"];

/// Reserved words that the grammar also accepts as names.
const ALSO_NAMES: &[&str] = &["ALL", "FIRST", "LAST"];

/// Operators and punctuation, longer ones first. The grammar does not allow `--`, which begins a comment in other
/// dialects.
const SYMBOLS: &[&str] = &[
    "||", "??", "!=", "<=", ">=", "--", "(", ")", "[", "]", "{", "}", ".", ",", ":", "?", "*", "/", "%", "+", "-", "<",
    ">", "=", "&", "^", "|", "~",
];

/// The kind of a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum TokenKind {
    Word,
    /// A reserved word, as spelled in the lists above.
    Keyword(&'static str),
    Number,
    /// A string with its escape sequences resolved.
    Text(String),
    Parameter,
    Symbol(&'static str),
    End,
}

/// A token and its position in the text, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Token {
    pub kind: TokenKind,
    pub start: usize,
    pub end: usize,
}

impl Token {
    pub fn is_end(&self) -> bool {
        self.kind == TokenKind::End
    }

    pub fn is_symbol(&self, symbol: &str) -> bool {
        matches!(self.kind, TokenKind::Symbol(other) if other == symbol)
    }

    pub fn is_keyword(&self, keyword: &str) -> bool {
        matches!(self.kind, TokenKind::Keyword(other) if other == keyword)
    }

    /// Whether the grammar accepts the token as a name.
    pub fn is_name(&self) -> bool {
        matches!(self.kind, TokenKind::Word)
            || matches!(self.kind, TokenKind::Keyword(word) if ALSO_NAMES.contains(&word))
    }

    /// Returns the token's part of `text`.
    pub fn text<'a>(&self, text: &'a str) -> &'a str {
        &text[self.start..self.end]
    }
}

/// Returns the reserved word that `word` spells, if it is one.
fn keyword(word: &str) -> Option<&'static str> {
    let in_any_case = RESERVED.iter().find(|reserved| reserved.eq_ignore_ascii_case(word));
    in_any_case.or_else(|| RESERVED_IN_LOWER_CASE.iter().find(|reserved| **reserved == word)).copied()
}

/// Whether the grammar does not accept `word` as a name.
pub(super) fn is_reserved(word: &str) -> bool {
    keyword(word).is_some_and(|keyword| !ALSO_NAMES.contains(&keyword))
}

/// Whether `name` has the form of a name, reserved or not.
pub(super) fn is_word(name: &str) -> bool {
    !name.is_empty() && word_length(name) == name.len()
}

/// Returns the number of bytes of the word at the beginning of `text`.
pub(super) fn word_length(text: &str) -> usize {
    let begins = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    if begins {
        text.bytes().take_while(is_part).count()
    } else {
        0
    }
}

/// Splits a text into its tokens. The last token is the end.
pub(super) fn tokens(text: &str) -> Result<Vec<Token>, SyntaxError> {
    let mut lexer = Lexer { text, at: 0 };
    let mut tokens = Vec::new();
    loop {
        let token = lexer.next()?;
        let is_end = token.is_end();
        tokens.push(token);
        if is_end {
            return Ok(tokens);
        }
    }
}

struct Lexer<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Lexer<'a> {
    fn next(&mut self) -> Result<Token, SyntaxError> {
        self.skip(|byte| matches!(byte, b' ' | b'\r' | b'\n' | b'\t'));
        let start = self.at;
        let kind = self.kind()?;
        Ok(Token { kind, start, end: self.at })
    }

    fn kind(&mut self) -> Result<TokenKind, SyntaxError> {
        match self.peek(0) {
            None => Ok(TokenKind::End),
            Some(quote @ (b'\'' | b'"')) => self.string(char::from(quote)),
            Some(b'@') => self.parameter(),
            Some(b'0'..=b'9') => Ok(self.number()),
            Some(b'.') if self.is_digit(1) => Ok(self.number()),
            Some(b'a'..=b'z' | b'A'..=b'Z' | b'_') => Ok(self.word()),
            Some(_) => self.symbol(),
        }
    }

    fn word(&mut self) -> TokenKind {
        let word = &self.rest()[..word_length(self.rest())];
        self.at += word.len();
        keyword(word).map_or(TokenKind::Word, TokenKind::Keyword)
    }

    fn parameter(&mut self) -> Result<TokenKind, SyntaxError> {
        let length = word_length(&self.rest()[1..]);
        if length == 0 {
            return Err(SyntaxError::invalid_token(self.at, "@"));
        }
        self.at += 1 + length;
        Ok(TokenKind::Parameter)
    }

    /// Reads a number. A sign before it is a separate operator.
    fn number(&mut self) -> TokenKind {
        self.skip(|byte| byte.is_ascii_digit());
        if self.peek(0) == Some(b'.') {
            self.at += 1;
            self.skip(|byte| byte.is_ascii_digit());
        }
        self.exponent();
        TokenKind::Number
    }

    fn exponent(&mut self) {
        let signed = matches!(self.peek(1), Some(b'+' | b'-'));
        let digits = if signed { 2 } else { 1 };
        if matches!(self.peek(0), Some(b'e' | b'E')) && self.is_digit(digits) {
            self.at += digits;
            self.skip(|byte| byte.is_ascii_digit());
        }
    }

    fn symbol(&mut self) -> Result<TokenKind, SyntaxError> {
        let rest = self.rest();
        if let Some(symbol) = SYMBOLS.iter().find(|symbol| rest.starts_with(**symbol)) {
            self.at += symbol.len();
            return Ok(TokenKind::Symbol(symbol));
        }
        let end = rest.chars().next().map_or(0, char::len_utf8);
        Err(SyntaxError::invalid_token(self.at, &rest[..end]))
    }

    fn string(&mut self, quote: char) -> Result<TokenKind, SyntaxError> {
        let start = self.at;
        let mut value = String::new();
        let mut chars = self.rest().char_indices().skip(1);
        while let Some((at, c)) = chars.next() {
            let invalid = |expected| SyntaxError::invalid_string(start, &self.text[start..start + at], expected);
            match c {
                c if c == quote => {
                    self.at = start + at + 1;
                    return Ok(TokenKind::Text(value));
                }
                '\\' => {
                    let escape = escape(&self.text[start + at + 1..]).ok_or_else(|| invalid("an escape sequence"))?;
                    value.push(escape.value);
                    // The length counts bytes, and all of them are ASCII.
                    chars.nth(escape.length - 1);
                }
                c if c < ' ' => return Err(invalid("no control character in a string")),
                c => value.push(c),
            }
        }
        Err(SyntaxError::invalid_string(start, &self.text[start..], "the end of the string"))
    }

    fn skip(&mut self, is_part: impl Fn(&u8) -> bool) {
        self.at += self.rest().bytes().take_while(is_part).count();
    }

    fn is_digit(&self, ahead: usize) -> bool {
        self.peek(ahead).is_some_and(|byte| byte.is_ascii_digit())
    }

    fn peek(&self, ahead: usize) -> Option<u8> {
        self.text.as_bytes().get(self.at + ahead).copied()
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }
}

/// An escape sequence without its backslash.
struct Escape {
    value: char,
    length: usize,
}

/// Reads the escape sequence at the beginning of `text`.
///
/// The published grammar lacks the escaped single quote, but the service's documentation lists it.
fn escape(text: &str) -> Option<Escape> {
    let value = match text.chars().next()? {
        c @ ('\'' | '"' | '\\' | '/') => c,
        'b' => '\u{8}',
        'f' => '\u{c}',
        'n' => '\n',
        'r' => '\r',
        't' => '\t',
        'u' => return unicode(text),
        _ => return None,
    };
    Some(Escape { value, length: 1 })
}

/// Reads `u` and four hex digits, or two such halves of a surrogate pair. A single half becomes the replacement
/// character.
fn unicode(text: &str) -> Option<Escape> {
    let first = hex(text.get(1..5)?)?;
    let second = text.get(5..).and_then(|rest| rest.strip_prefix("\\u")?.get(..4)).and_then(hex);
    if let Some(Ok(value)) = second.and_then(|second| char::decode_utf16([first, second]).next()) {
        let length = if value.len_utf16() == 2 { 11 } else { 5 };
        return Some(Escape { value, length });
    }
    let value = char::from_u32(u32::from(first)).unwrap_or(char::REPLACEMENT_CHARACTER);
    Some(Escape { value, length: 5 })
}

fn hex(digits: &str) -> Option<u16> {
    let is_hex = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hex.then(|| u16::from_str_radix(digits, 16).ok()).flatten()
}
