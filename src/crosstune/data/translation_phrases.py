"""List phrases in English and three languages, and the orders in which they make a sentence."""

from __future__ import annotations

LANGUAGES = ("Spanish", "Italian", "Portuguese")

# Slot -> phrases: English, then one for each language.
PHRASES: dict[str, tuple[tuple[str, ...], ...]] = {
    "time": (
        ("today", "hoy", "oggi", "hoje"),
        ("yesterday", "ayer", "ieri", "ontem"),
        ("every week", "cada semana", "ogni settimana", "toda semana"),
        ("this morning", "esta mañana", "stamattina", "esta manhã"),
        ("last night", "anoche", "ieri sera", "ontem à noite"),
        ("on Monday", "el lunes", "lunedì", "na segunda-feira"),
        ("in winter", "en invierno", "in inverno", "no inverno"),
        ("last year", "el año pasado", "l'anno scorso", "no ano passado"),
    ),
    "subject": (
        ("the teacher", "la maestra", "la maestra", "a professora"),
        ("my brother", "mi hermano", "mio fratello", "meu irmão"),
        ("our neighbour", "nuestro vecino", "il nostro vicino", "nosso vizinho"),
        ("the doctor", "el médico", "il medico", "o médico"),
        ("her daughter", "su hija", "sua figlia", "sua filha"),
        ("the old sailor", "el viejo marinero", "il vecchio marinaio", "o velho marinheiro"),
        ("the young cook", "el joven cocinero", "il giovane cuoco", "o jovem cozinheiro"),
        ("a tourist", "un turista", "un turista", "um turista"),
        ("my aunt", "mi tía", "mia zia", "minha tia"),
        ("the farmer", "el granjero", "il contadino", "o fazendeiro"),
    ),
    "verb": (
        ("bought", "compró", "ha comprato", "comprou"),
        ("sold", "vendió", "ha venduto", "vendeu"),
        ("found", "encontró", "ha trovato", "encontrou"),
        ("lost", "perdió", "ha perso", "perdeu"),
        ("painted", "pintó", "ha dipinto", "pintou"),
        ("carried", "llevó", "ha portato", "carregou"),
        ("counted", "contó", "ha contato", "contou"),
        ("photographed", "fotografió", "ha fotografato", "fotografou"),
        ("washed", "lavó", "ha lavato", "lavou"),
    ),
    "number": (
        ("two", "dos", "due", "dois"),
        ("three", "tres", "tre", "três"),
        ("four", "cuatro", "quattro", "quatro"),
        ("five", "cinco", "cinque", "cinco"),
        ("six", "seis", "sei", "seis"),
        ("seven", "siete", "sette", "sete"),
        ("eight", "ocho", "otto", "oito"),
        ("nine", "nueve", "nove", "nove"),
        ("ten", "diez", "dieci", "dez"),
    ),
    "object": (
        ("books", "libros", "libri", "livros"),
        ("horses", "caballos", "cavalli", "cavalos"),
        ("hats", "sombreros", "cappelli", "chapéus"),
        ("fish", "peces", "pesci", "peixes"),
        ("boats", "barcos", "barche", "barcos"),
        ("glasses", "vasos", "bicchieri", "copos"),
        ("clocks", "relojes", "orologi", "relógios"),
        ("dogs", "perros", "cani", "cães"),
        ("plates", "platos", "piatti", "pratos"),
        ("carpets", "tapices", "tappeti", "tapetes"),
    ),
    "place": (
        ("at the market", "en el mercado", "al mercato", "no mercado"),
        ("near the river", "cerca del río", "vicino al fiume", "perto do rio"),
        ("in the garden", "en el jardín", "nel giardino", "no jardim"),
        ("behind the church", "detrás de la iglesia", "dietro la chiesa", "atrás da igreja"),
        ("at the station", "en la estación", "alla stazione", "na estação"),
        ("on the beach", "en la playa", "sulla spiaggia", "na praia"),
        ("in the village", "en el pueblo", "nel villaggio", "na aldeia"),
        ("beside the school", "junto a la escuela", "accanto alla scuola", "ao lado da escola"),
    ),
}

GRAMMARS: tuple[tuple[str, ...], ...] = (
    ("time", "subject", "verb", "number", "object", "place"),
    ("subject", "verb", "number", "object", "place", "time"),
    ("place", "subject", "verb", "number", "object"),
    ("subject", "verb", "number", "object", "time"),
)
"""The slots of a sentence, in the order that English and the three languages share."""
